"""A trained model belongs to its data: files that have changed since are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from shop import LOAD, open_shop, shop_options, tables, train, write

import recbole_pos
from recbole_pos.data.events import EventLog
from recbole_pos.data.identity import compute_identity, describe_changes
from recbole_pos.errors import CheckpointError, UsageError
from recbole_pos.experiment.run import load


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of a shop, and of a run on it."""
    folder = write(tmp_path_factory.mktemp("shop"), tables())
    train(folder, folder / "run", epochs=1)
    return folder, folder / "run"


def other_shop(trained: tuple[Path, Path], tmp_path: Path, **columns: dict[str, str]) -> Path:
    """A copy of the run on a copy of the shop where columns are the other way round."""
    made = tables()
    for table, fields in columns.items():
        for field in fields:
            column = next(c for c in made[table] if c.startswith(f"{field}:"))
            made[table][column] = made[table][column].to_numpy()[::-1]
    folder, run = write(tmp_path, made), tmp_path / "run"
    shutil.copytree(trained[1], run)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace(str(trained[0].resolve()), str(folder.resolve())))
    return run


def test_the_same_files_are_the_same_data(trained: tuple[Path, Path], tmp_path: Path) -> None:
    made = recbole_pos.load(other_shop(trained, tmp_path))
    fields = {"brand", "tags", "price", "weight", "channel", "stars", "country", "age"}
    assert set(made.dataset.identity["fields"]) == fields


@pytest.mark.parametrize(
    "changed",
    [{"item": ["brand"]}, {"item": ["tags", "price"]}, {"user": ["age"]}, {"inter": ["stars"]}],
    ids=str,
)
def test_changed_attributes_are_refused(
    trained: tuple[Path, Path], tmp_path: Path, changed: dict[str, list[str]]
) -> None:
    run = other_shop(trained, tmp_path, **changed)
    names = ", ".join(sorted(sum(changed.values(), [])))
    # a shop goes on recommending, and is reported
    assert recbole_pos.Recommender.load(run).changed == sorted(sum(changed.values(), []))
    for refused in (
        lambda: load(run),
        lambda: recbole_pos.run(resume=run, config_dict={"epochs": 2}, verbose=False),
    ):
        with pytest.raises(CheckpointError, match=f"the values of {names}, or the order of "):
            refused()


def tiny_dataset(
    items: tuple = (1, 2, 1, 3),
    users: tuple = (1, 1, 2, 2),
    times: tuple = (0.0, 1.0, 2.0, 3.0),
    part: tuple = (0, 0, 0, 2),
    tag: tuple = (1, 2, 1, 2),
    names: str = "abc",
    tags: str = "xy",
) -> SimpleNamespace:
    """What ``identity`` reads of a dataset."""
    fields = {"u": users, "i": items, "t": times, "tag": tag}
    tensors = {key: torch.tensor(value) for key, value in fields.items()}
    tensors["t"] = tensors["t"].double()
    return SimpleNamespace(
        log=EventLog.build(tensors, 4, "u", "i", "t"),
        part=np.array(part, dtype=np.int8),
        field2id_token={"i": np.array(["[PAD]", *names]), "tag": np.array(["[PAD]", *tags])},
        user_feat=None,
        item_feat=None,
        missing={},
    )


@pytest.mark.parametrize(
    "change",
    [
        {"items": (1, 2, 1, 2)},
        {"users": (1, 1, 1, 2)},
        {"times": (0.0, 1.0, 2.0, 4.0)},
        {"names": "bac"},
        {"part": (0, 0, 2, 2)},
    ],
    ids=str,
)
def test_each_part_of_the_data_counts(change: dict) -> None:
    now = compute_identity(tiny_dataset(**change))
    assert (
        describe_changes(compute_identity(tiny_dataset()), now)
        == "items, events, their times or what is held out"
    )


@pytest.mark.parametrize("change", [{"tags": "yx"}, {"tag": (1, 2, 2, 2)}], ids=str)
def test_each_part_of_a_field_counts(change: dict) -> None:
    now = compute_identity(tiny_dataset(**change))
    assert (
        describe_changes(compute_identity(tiny_dataset()), now)
        == "the values of tag, or the order of their lines,"
    )
    assert (
        describe_changes({**compute_identity(tiny_dataset()), "fields": {"other": "x"}}, now)
        is None
    )


def test_a_number_that_is_missing_now_is_a_change(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    """RecBole puts the mean in its place, which the number may have been."""
    one, other = (open_shop(trained[0]).dataset for _ in range(2))
    other.missing = {**other.missing, "price": ~other.missing["price"]}
    del other.__dict__["identity"]  # of what it was before
    differ = {f for f, d in one.identity["fields"].items() if d != other.identity["fields"][f]}
    assert differ == {"price"}


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    """RecBole would take one for the other."""
    made = tables()
    made["inter"]["price:float"] = 2.0
    folder = write(tmp_path, made)
    load = {**LOAD, "inter": [*LOAD["inter"], "price"]}
    given = shop_options(folder, load_col=load)
    with pytest.raises(UsageError, match="price: is loaded from shop.inter and from shop.item"):
        recbole_pos.run("AttrFormer", "shop", None, given, run_dir=tmp_path / "run")
    open_shop(folder, load_col={**load, "item": ["item_id", "brand"]}, relations=["price"])
