"""Recommendations into files; scores by hand."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import CROSS_ENTROPY, SMALL, small
from recbole.data.interaction import Interaction

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import prepare, read_dataset
from recbole_pos.experiment.state import extract_weights
from recbole_pos.model.models import BASELINES, MODELS
from recbole_pos.serve.recommender import Growth, Recommender

pytestmark = pytest.mark.slow


def train(model: str, data: Path, run_dir: Path, **more: Any) -> Path:
    config = small(model, data_path=str(data), epochs=1, **CROSS_ENTROPY.get(model, {}), **more)
    given = config.external_config_dict
    recbole_pos.run(model, "tiny", None, given, run_dir=run_dir, verbose=False)
    return run_dir


@pytest.fixture(scope="module")
def runs(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each kind: reads order, reads times, RecBole's sequential, RecBole's general."""
    folder = tmp_path_factory.mktemp("runs")
    names = ("PosSASRec", "TORoPE", "SASRec", "BPR")
    return {name: train(name, tiny, folder / name) for name in names}


@pytest.fixture
def run_dir(runs: dict[str, Path]) -> Path:
    return runs["PosSASRec"]


def histories(folder: Path) -> dict[str, pd.DataFrame]:
    """Return events of each user by time, ties as in the file."""
    log = pd.read_csv(folder / "tiny" / "tiny.inter", sep="\t")
    log.columns = [column.split(":")[0] for column in log]
    return dict(list(log.sort_values("timestamp", kind="stable").groupby("user_id")))


@pytest.mark.parametrize("model", ["PosSASRec", "TORoPE", "SASRec"])
def test_scores_after_the_whole_history(tiny: Path, runs: dict[str, Path], model: str) -> None:
    found = recbole_pos.recommend(runs[model], k=7)
    made = recbole_pos.load(runs[model])
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


QUICK = ("PosSASRec", "TORoPE", "KernelAttention", "PosRec", "SessionKNN", "NARM", "BPR", "Pop")
OTHERS = [name for name in (*MODELS, *BASELINES) if name not in (*QUICK, "AttrFormer")]


@pytest.mark.parametrize(
    ("model", "more"),
    [
        *((model, {}) for model in QUICK),
        *(pytest.param(model, {}, marks=pytest.mark.long) for model in OTHERS),
        ("AttrFormer", {"inference_relations": "training_bank"}),
        pytest.param("AttrFormer", {"inference_relations": "none"}, marks=pytest.mark.long),
        ("AttrFormer", {"inference_relations": "own", "cross_sequence": "time_respecting"}),
    ],
    ids=str,
)
def test_what_comes_next_is_asked_as_a_test_target_is(tiny: Path, model: str, more: dict) -> None:
    """Without the test events, what comes next is what they were: the same rows and scores."""
    given = {"data_path": str(tiny), "epochs": 1, **CROSS_ENTROPY.get(model, {}), **more}
    config = PosConfig(model, "tiny", None, small(model, **given).external_config_dict)
    dataset = read_dataset(config)
    dataset.build()
    known = prepare(config, dataset=dataset)
    known.trainer._train_epoch(known.trainer.training_loader(known.loaders["train"]), 0)
    weights, target = extract_weights(known.model), known.loaders["test"]
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
def test_seen_items_are_excluded(tiny: Path, runs: dict[str, Path], model: str) -> None:
    """All of them, the newest too; where nothing else is left there are fewer rows."""
    items = recbole_pos.load(runs[model]).dataset.item_num - 1
    found = recbole_pos.recommend(runs[model], k=items, mask_history=True)
    for user, events in histories(tiny).items():
        mine = found[found["user_id"] == user]
        past = set(events["item_id"])
        assert not past & set(mine["item_id"]) and len(mine) == items - len(past)
    default = recbole_pos.recommend(runs[model], k=items)  # as the run was evaluated
    assert len(default) == (len(found) if model == "BPR" else items * len(histories(tiny)))


def test_chosen_users(run_dir: Path) -> None:
    all_users = recbole_pos.recommend(run_dir, k=3)
    found = recbole_pos.recommend(run_dir, ["u7", "u2", "u7", "u30"], k=3)
    assert found["user_id"].tolist() == ["u7"] * 3 + ["u2"] * 3 + ["u30"] * 3
    for user in ("u7", "u2", "u30"):
        want, got = (x.loc[x["user_id"] == user, "item_id"] for x in (all_users, found))
        assert want.tolist() == got.tolist()
    assert recbole_pos.recommend(run_dir, "u30", k=1)["user_id"].tolist() == ["u30"]
    for users in (["no one", "u1", "x"], []):
        with pytest.raises(UsageError, match="users: "):
            recbole_pos.recommend(run_dir, users)
    for k in (0, 10**6, 1.5, "3"):
        with pytest.raises(UsageError, match=f"k: .*found {k!r}"):
            recbole_pos.recommend(run_dir, k=k)


def test_command(tiny: Path, tmp_path: Path, capsys: Any) -> None:
    run_dir = train("PosSASRec", tiny, tmp_path / "run", eval_batch_size=7)
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
    assert main(["recommend", str(tmp_path)]) == 2
    assert main(["recommend", str(run_dir), "--out", str(tmp_path / "none" / "a.csv")]) == 2
    assert main(["recommend", str(run_dir), "--out", "/dev/full"]) == 1  # nothing else is there now
    assert "cannot write /dev/full: No space left on device" in capsys.readouterr().err
    assert Path("/dev/full").is_char_device()
    assert sorted(x.name for x in tmp_path.iterdir()) == ["run", "some where.csv"]


def test_recommendations_through_a_pipe(run_dir: Path) -> None:
    """Nothing but the table goes through it."""
    command = [sys.executable, "-m", "recbole_pos.cli.main", "recommend", str(run_dir), "-k", "2"]
    found = subprocess.run([*command, "--out", "/dev/stdout"], capture_output=True, text=True)
    table = pd.read_csv(io.StringIO(found.stdout))
    assert len(table) == 2 * table["user_id"].nunique() > 0 and set(table["rank"]) == {1, 2}


def test_files_of_histories_and_names(runs: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    """Json lines and parquet, to csv and parquet; no cell of a csv file begins a formula."""
    ids = ["=1+1", "+a", "-3", "@x", "\tq", "plain"]
    rows = [{"id": name, "items": ["i1", "i2"], "times": [1, 5]} for name in ids]
    rows.append({"items": ["x"], "times": [1]})
    (tmp_path / "h.jsonl").write_text("".join(f"{json.dumps(row)}\n\n" for row in rows))
    rows[-1]["id"] = str(len(ids))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "h.parquet")
    (tmp_path / "stock.txt").write_text("i1\n\ni2 \ni3\nnever heard of\n")
    for given in ("h.jsonl", "h.parquet"):
        for name in ("o.csv", "o.parquet"):
            command = ["recommend", str(runs["TORoPE"]), "-k2", f"--items={tmp_path / 'stock.txt'}"]
            files = [f"--histories={tmp_path / given}", f"--out={tmp_path / name}"]
            assert main([*command, *files]) == 0
        table, cells = pd.read_parquet(tmp_path / "o.parquet"), pd.read_csv(tmp_path / "o.csv")
        assert set(table["item"]) <= {"i1", "i3"} and table["id"].tolist() == [
            name for name in [*ids, "6"] for _ in range(2)
        ]
        quoted = ["'=1+1", "'+a", "-3", "'@x", "'\tq", "plain", "6"]
        assert cells["id"].astype(str).tolist()[::2] == quoted
        out = capsys.readouterr().out
        assert "1 items of histories are not known to the model" in out and "spreadsheet" in out
        assert "1 of 7 get the most popular items" in out and "--exclude_seen leaves these" in out


def test_files_that_are_no_histories(runs: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    """One line, exit 2, and no file is left; of none, a table without rows."""
    given, out = tmp_path / "given.jsonl", tmp_path / "out.csv"
    damaged, run_dir = tmp_path / "damaged.parquet", str(runs["TORoPE"])
    pq.write_table(pa.table({"id": ["a"], "items": [["i1"]]}), damaged)
    whole = damaged.read_bytes()
    texts = ('{"id": "\\ud800", "items": []}', "[" * 10**5, "{}", '{"items": ["i1"]}')
    cases = [
        *((given, text.encode()) for text in texts),
        *((given, b"\xff"), (given, b'{"items": [' + b"9" * 5000 + b"]}")),
        *((damaged, whole[:at] + b"\xff\xff" + whole[at + 2 :]) for at in (len(whole) - 9, 0)),
        *((damaged, whole), (damaged, whole[:100]), (damaged, b"")),
    ]
    for file, content in cases:
        file.write_bytes(content)
        assert main(["recommend", run_dir, f"--histories={file}", f"--out={out}"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and not out.exists()
    for option in ("histories", "items", "exclude", "out"):
        for value in ("--", "x" * 300):
            assert main(["recommend", run_dir, f"--{option}={value}"]) == 2
            assert capsys.readouterr().err.count("\n") == 1
    given.write_text("")
    for out, read in ((tmp_path / "o.csv", pd.read_csv), (tmp_path / "o.parquet", pd.read_parquet)):
        assert main(["recommend", run_dir, f"--histories={given}", f"--out={out}"]) == 0
        assert list(read(out)) == ["id", "rank", "item", "score", "by"] and not len(read(out))
    assert pq.read_schema(out).field("item").type == pa.string()
