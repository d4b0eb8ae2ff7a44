"""Recommendations for every user, against scores of histories written out by hand."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import CROSS_ENTROPY, SMALL, small
from recbole.data.interaction import Interaction

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import prepare, read_dataset
from recbole_pos.experiment.state import weights_of
from recbole_pos.model.models import BASELINES, MODELS
from recbole_pos.serve.recommender import Growth, Recommender


def options(model: str, folder: Path, **more: Any) -> dict[str, Any]:
    more = {"data_path": str(folder), "epochs": 1, **CROSS_ENTROPY.get(model, {}), **more}
    return small(model, **more).external_config_dict


def trained(model: str, folder: Path, run_dir: Path, **more: Any) -> Path:
    given = options(model, folder, **more)
    recbole_pos.run(model, "tiny", None, given, run_dir=run_dir, verbose=False)
    return run_dir


def histories(folder: Path) -> dict[str, pd.DataFrame]:
    """Events of each user by time, ties as in the file."""
    log = pd.read_csv(folder / "tiny" / "tiny.inter", sep="\t")
    log.columns = [column.split(":")[0] for column in log]
    log = log.sort_values("timestamp", kind="stable")
    return dict(list(log.groupby("user_id")))


@pytest.mark.parametrize("model", ["PosSASRec", "TORoPE", "SASRec"])
def test_scores_after_the_whole_history(tiny: Path, tmp_path: Path, model: str) -> None:
    run_dir = trained(model, tiny, tmp_path / "run")
    found = recbole_pos.recommend(run_dir, k=7)
    made = recbole_pos.load(run_dir)
    ids, names = (
        getattr(made.dataset, f"field2{kind}")["item_id"] for kind in ("token_id", "id_token")
    )
    users = histories(tiny)
    assert set(found["user_id"]) == set(users) and len(found) == 7 * len(users)
    for user, events in users.items():
        newest = events.tail(SMALL["MAX_ITEM_LIST_LENGTH"])
        row = {
            "item_id_list": torch.tensor([[ids[i] for i in newest["item_id"]]]),
            "item_length": torch.tensor([len(newest)]),
            "timestamp_list": torch.tensor(newest["timestamp"].to_numpy(np.float64))[None],
        }
        with torch.no_grad():
            scores = made.model.full_sort_predict(Interaction(row))[0]
        scores[0] = -torch.inf
        best, items = scores.topk(7)
        mine = found[found["user_id"] == user]
        assert mine["rank"].tolist() == list(range(1, 8))
        assert mine["item_id"].tolist() == names[items.numpy()].tolist()
        np.testing.assert_allclose(mine["score"], best.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "more"),
    [
        *(
            (model, {})
            for model in [*MODELS, *BASELINES, "NARM", "BPR", "Pop"]
            if model != "AttrFormer"
        ),
        *(
            ("AttrFormer", {"inference_relations": kind})
            for kind in ("training_bank", "own", "none")
        ),
        ("AttrFormer", {"inference_relations": "own", "cross_sequence": "time_respecting"}),
    ],
    ids=str,
)
def test_what_comes_next_is_asked_as_a_test_target_is(tiny: Path, model: str, more: dict) -> None:
    """Without the test events, what comes next is what they were: the same rows and scores."""
    config = PosConfig(model, "tiny", None, options(model, tiny, **more))
    dataset = read_dataset(config)
    dataset.build()
    known = prepare(config, dataset=dataset)
    weights = weights_of(known.model)
    known.trainer._train_epoch(known.trainer.training_loader(known.loaders["train"]), 0)
    weights, target = weights_of(known.model), known.loaders["test"]
    known.model.eval()
    before = prepare(config, dataset=dataset.without_test())
    before.trainer.load_weights(weights)
    before.model.eval()
    asked = Recommender(before, Growth())
    every = torch.arange(dataset.item_num)
    for rows, *_ in target:
        names = dataset.field2id_token["user_id"][rows["user_id"]]
        with torch.inference_mode():
            scores = known.model.full_sort_predict(rows).view(len(rows), -1)
            found = asked.scorer.scores(asked.of_users(names))(every)
        torch.testing.assert_close(found, scores)


@pytest.mark.parametrize("model", ["PosSASRec", "BPR"])
def test_past_items_left_out(tiny: Path, tmp_path: Path, model: str) -> None:
    """All of them, the newest too; where nothing else is left there are fewer rows."""
    run_dir = trained(model, tiny, tmp_path / "run")
    items = recbole_pos.load(run_dir).dataset.item_num - 1
    found = recbole_pos.recommend(run_dir, k=items, mask_history=True)
    for user, events in histories(tiny).items():
        mine = found[found["user_id"] == user]
        past = set(events["item_id"])
        assert not past & set(mine["item_id"]) and len(mine) == items - len(past)
    default = recbole_pos.recommend(run_dir, k=items)
    assert len(default) == len(found) if model == "BPR" else items * len(histories(tiny))
    assert len(recbole_pos.recommend(run_dir, k=items, mask_history=False)) > len(found)


def test_chosen_users(tiny: Path, tmp_path: Path) -> None:
    run_dir = trained("PosSASRec", tiny, tmp_path / "run")
    everyone = recbole_pos.recommend(run_dir, k=3)
    found = recbole_pos.recommend(run_dir, ["u7", "u2", "u7", "u30"], k=3)
    assert found["user_id"].tolist() == ["u7"] * 3 + ["u2"] * 3 + ["u30"] * 3
    for user in ("u7", "u2", "u30"):
        want, got = (x[x["user_id"] == user].reset_index(drop=True) for x in (everyone, found))
        assert want["item_id"].tolist() == got["item_id"].tolist()
    with pytest.raises(UsageError, match="users: 2 of 3 have no event in 'tiny': 'nobody', 'x'"):
        recbole_pos.recommend(run_dir, ["nobody", "u1", "x"])
    assert recbole_pos.recommend(run_dir, "u30", k=1)["user_id"].tolist() == ["u30"]
    with pytest.raises(UsageError, match="users: 0 of 0 have no event"):
        recbole_pos.recommend(run_dir, [])
    for k in (0, 10**6, 1.5, "3"):
        with pytest.raises(UsageError, match=f"k: expected 1 to .*found {k!r}"):
            recbole_pos.recommend(run_dir, k=k)


def test_command(tiny: Path, tmp_path: Path, capsys) -> None:
    run_dir = trained("PosSASRec", tiny, tmp_path / "run", eval_batch_size=7)
    assert main(["recommend", str(run_dir), "-k", "2"]) == 0
    file = run_dir / "recommendations.csv"
    assert str(file) in capsys.readouterr().out
    pd.testing.assert_frame_equal(
        pd.read_csv(file), recbole_pos.recommend(run_dir, k=2), check_dtype=False, rtol=1e-5
    )
    out = tmp_path / "some where.csv"
    assert main(["recommend", str(run_dir), "--users", "u3", "--mask_history", f"--out={out}"]) == 0
    assert len(pd.read_csv(out)) == 10
    assert main(["recommend", str(run_dir), "-k", "0", "--out", str(tmp_path / "no.csv")]) == 2
    assert main(["recommend", str(run_dir), "--topk=5"]) == 2
    assert "no further arguments expected, found --topk=5" in capsys.readouterr().err
    assert main(["recommend", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    capsys.readouterr()
    assert main(["recommend", str(run_dir), "--out", str(tmp_path / "none" / "a.csv")]) == 2
    assert f"there is no folder {tmp_path}/none\n" in capsys.readouterr().err
    assert main(["recommend", str(run_dir), "--out", "/dev/full"]) == 1  # nothing else is there now
    assert "cannot write /dev/full: No space left on device" in capsys.readouterr().err
    assert Path("/dev/full").is_char_device()
    assert sorted(x.name for x in tmp_path.iterdir()) == ["run", "some where.csv"]


def test_recommendations_through_a_pipe(tiny: Path, tmp_path: Path) -> None:
    """Nothing but the table goes through it."""
    run_dir = trained("PosSASRec", tiny, tmp_path / "run")
    command = [sys.executable, "-m", "recbole_pos.cli.main", "recommend", str(run_dir), "-k", "2"]
    found = subprocess.run([*command, "--out", "/dev/stdout"], capture_output=True, text=True)
    table = pd.read_csv(io.StringIO(found.stdout))
    assert len(table) == 2 * table["user_id"].nunique() > 0 and set(table["rank"]) == {1, 2}
