"""Training resumes from the weights of a run on data that have grown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import CROSS_ENTROPY, SMALL, make_log, write_atomic
from test_grown import grow

import recbole_pos
from recbole_pos.errors import UsageError
from recbole_pos.experiment.warm_start import fill_new


def train(folder: Path, model: str, **more: Any) -> Path:
    given = {**SMALL, "data_path": str(folder), "epochs": 1, **CROSS_ENTROPY.get(model, {}), **more}
    recbole_pos.run(model, "tiny", None, given, run_dir=folder / "old", verbose=False)
    return folder / "old"


def update(folder: Path, name: str = "new", **options: Any) -> Path:
    new_items = options.pop("new_items", None)
    recbole_pos.update(
        folder / "old", options, run_dir=folder / name, new_items=new_items, verbose=False
    )
    return folder / name


def vectors(run_dir: Path) -> dict[str, np.ndarray]:
    return dict(zip(*recbole_pos.Recommender.load(run_dir).item_vectors(), strict=True))


@pytest.mark.parametrize("model", ["PosSASRec", "FPARec", "KernelAttention", "AttrFormer"])
def test_starts_with_the_weights_of_each_name(tmp_path: Path, model: str) -> None:
    """Nothing is learned at this rate, so every name still has its vector; lines are shuffled."""
    log = make_log()
    old = train(write_atomic(log, tmp_path), model)
    before = recbole_pos.load(old).model.state_dict()
    write_atomic(grow(log, shuffle=True), tmp_path)
    made = recbole_pos.load(update(tmp_path, epochs=1, learning_rate=1e-30, stopping_step=1))
    names = made.dataset.field2id_token["item_id"]
    assert names[-1] == "a new item" and made.dataset.field2token_id["user_id"]["no one"]
    for name, weight in made.model.state_dict().items():
        then = before[name]
        known = weight[tuple(slice(size) for size in then.shape)]
        torch.testing.assert_close(known, then, rtol=0, atol=1e-12)


def test_an_updated_run_is_a_run(tmp_path: Path) -> None:
    """It resumes, recommends what is new, and can be updated itself."""
    log = make_log()
    train(write_atomic(log, tmp_path), "FPARec")
    write_atomic(grow(log, shuffle=False), tmp_path)
    new = update(tmp_path, epochs=2)
    found = recbole_pos.recommend(new, k=len(log["item_id"].unique()))
    assert "a new item" in set(found["item_id"]) and "no one" in set(found["user_id"])
    whole = recbole_pos.run(resume=new, config_dict={"epochs": 4}, verbose=False)
    assert whole.epochs == 4
    (tmp_path / "old").rename(tmp_path / "away")  # its own folder knows the ids
    again = recbole_pos.recommend(new, k=3)
    assert set(again["user_id"]) == set(found["user_id"])
    new.rename(tmp_path / "old")
    more = pd.DataFrame({"user_id": ["u5"], "item_id": ["another"], "timestamp": [3e9]})
    write_atomic(pd.concat((grow(log, shuffle=False), more)), tmp_path)
    assert {"a new item", "another"} <= set(vectors(update(tmp_path, "third", epochs=1)))


def test_new_items_from_their_attribute(tmp_path: Path) -> None:
    log = make_log()
    items = pd.DataFrame({"item_id:token": sorted(log["item_id"].unique())})
    items["kind:token"] = [f"k{number % 3}" for number in range(len(items))]
    file = write_atomic(log, tmp_path) / "tiny" / "tiny.item"
    items.to_csv(file, sep="\t", index=False)
    load_col = {"inter": ["user_id", "item_id", "timestamp"], "item": ["item_id", "kind"]}
    old = vectors(train(tmp_path, "FPARec", load_col=load_col))
    write_atomic(grow(log, shuffle=False), tmp_path)
    items.loc[len(items)] = ("a new item", "k1")
    items.to_csv(file, sep="\t", index=False)
    new = vectors(update(tmp_path, epochs=1, learning_rate=1e-30, new_items="kind"))
    alike = items.iloc[:-1].query("`kind:token` == 'k1'")["item_id:token"]
    expected = np.mean([old[name] for name in alike], axis=0)
    np.testing.assert_allclose(new["a new item"], expected, rtol=1e-5)
    with pytest.raises(UsageError, match="new_items|field 'kinds' is not loaded"):
        update(tmp_path, "third", epochs=1, new_items="kinds")


def test_means_of_shared_tokens() -> None:
    """Against loops."""
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(rng.integers(0, 7, (30, 3)))
    tokens[0] = 0
    tokens[29] = 8  # no one else's
    start = torch.randn(30, 4, dtype=torch.float64)
    found = start.clone()
    fill_new(found, 20, tokens)
    assert torch.equal(found[:20], start[:20]) and torch.equal(found[29], start[29])
    for new in range(20, 29):
        means = []
        for token in set(tokens[new].tolist()) - {0}:
            having = [start[i] for i in range(20) if token in tokens[i].tolist()]
            if having:
                means.append(sum(having) / len(having))
        torch.testing.assert_close(found[new], sum(means) / len(means) if means else start[new])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 32}, "was trained with hidden_size: 16, this run has 32"),
        ({"init_from": "x"}, "weights come from one run"),
        ({"MAX_ITEM_LIST_LENGTH": 5}, "MAX_ITEM_LIST_LENGTH"),
    ],
)
def test_what_does_not_fit(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    train(write_atomic(make_log(), tmp_path), "FPARec")
    given = {"update_from": str(tmp_path / "old"), **options}
    with pytest.raises(UsageError, match=message):
        recbole_pos.run(
            None, None, [str(tmp_path / "old" / "config.yaml")], given, run_dir=tmp_path / "new"
        )
    (tmp_path / "old" / "known.parquet").unlink()
    with pytest.raises(UsageError, match="made by an earlier version"):
        recbole_pos.update(tmp_path / "old")
