"""Tables of relations between classes: what counts, what is missing, what is too large."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from shop import LOAD, categorical, open_shop, tables, write

from recbole_pos.errors import UsageError
from recbole_pos.relations import tables as tables_module
from recbole_pos.relations.search import top_differences
from recbole_pos.relations.tables import WEAKEST, RelationTable


def test_missing_and_repeated_names() -> None:
    """A name counts once; an empty cell has no class and no relation, to itself neither."""
    group, matrix = categorical(np.array([[1, 1, 2], [0, 2, 0], [0, 0, 0], [2, 1, 0]]), "x")
    assert group[2] == 0 and group[0] == group[3] != group[1]
    assert matrix[group[0], group[0]] == 2 and matrix[group[0], group[1]] == 1
    assert matrix[0].nnz == 0
    nothing = np.full(3, np.nan)
    group, values = tables_module.number_classes(nothing)
    assert group.tolist() == [0, 0, 0] and len(values) == 1
    assert tables_module.numerical(values, [1.0], "x").nnz == 0


def test_infinite_numbers_are_missing() -> None:
    column = np.array([2.0, np.inf, 1.0, -np.inf, np.nan, 2.0])
    group, values = tables_module.number_classes(column)
    assert group.tolist() == [2, 0, 1, 0, 0, 2] and values[1:].tolist() == [1, 2]
    assert tables_module.numerical(values, [1.0], "x").shape == (3, 3)


def test_differences_too_large_to_matter_are_never_formed() -> None:
    group, values = tables_module.number_classes(np.arange(4000.0))
    matrix = tables_module.numerical(values, [1.0], "x")
    assert matrix.nnz < 4000 * 29 and matrix[group[0], group[13]] == pytest.approx(np.exp(-13))
    assert (matrix != matrix.T).nnz == 0


def test_tables_too_large_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(tables_module, "LARGEST", 100)
    with pytest.raises(UsageError, match="tags relates up to 156 pairs.*values, or a condition"):
        categorical(np.stack((np.ones(12, int), np.arange(12) + 2), 1), "tags")
    with pytest.raises(UsageError, match="price relates up to 144 pairs.*scale, or a condition"):
        tables_module.numerical(tables_module.number_classes(np.arange(12.0))[1], [1.0], "price")


def test_users_of_too_many_kinds_together_are_refused(tmp_path: Path, monkeypatch) -> None:
    """Each attribute has few pairs, but every user is a kind of its own by both."""
    made = tables()
    users = len(made["user"])
    made["user"]["gender:token"] = ["a", "b"] * (users // 2) + ["a"] * (users % 2)
    made["user"]["income:float"] = 1000.0 * np.arange(users)
    load = {**LOAD, "user": ["user_id", "gender", "income"]}
    folder = write(tmp_path, made)
    monkeypatch.setattr(tables_module, "LARGEST", 3 * users)
    for alone in ("gender", "income"):
        open_shop(folder, load_col=load, relations=[alone])
    with pytest.raises(UsageError, match="gender and income relates up to .* use fields with few"):
        open_shop(folder, load_col=load, relations=["gender", "income"])


def test_a_condition_spares_a_large_table(tmp_path: Path, monkeypatch) -> None:
    """Titles that share a word, within brands of one item each: refused alone, not within."""
    made = tables()
    items = len(made["item"])
    made["item"]["title:token_seq"] = [f"toy w{n}" for n in range(items)]
    made["item"]["maker:token"] = [f"m{n}" for n in range(items)]
    load = {**LOAD, "item": ["item_id", "title", "maker"]}
    folder = write(tmp_path, made)
    monkeypatch.setattr(tables_module, "LARGEST", 2 * items)
    monkeypatch.setattr(tables_module, "PART", 3)
    with pytest.raises(UsageError, match="title relates up to"):
        open_shop(folder, load_col=load, relations=["title"])
    relation = {"field": "title", "within": "maker"}
    table = open_shop(folder, load_col=load, relations=[relation]).model.lookup.heads[0].table
    assert (table.values == 2).all() and len(table.values) == items


def test_the_weakest_relation_of_numbers() -> None:
    """What is below the limit is none, wherever numbers are compared."""
    far = -math.log(WEAKEST)
    for value, edges in ((far - 0.01, 1), (far + 0.01, 0)):
        found = top_differences(np.array([0, value]), np.zeros(2, int), 3, (1.0,), WEAKEST, 5, True)
        assert len(found.value) == edges
    group, values = tables_module.number_classes(np.array([0.0, 50.0]))
    joint = tables_module.restrict_within(
        group,
        lambda i, j: tables_module.similarity(values[i] - values[j], [1.0]),
        *categorical(np.array([1, 1]), "brand"),
        "price",
    )
    assert RelationTable.from_matrix(*joint).matrix().nnz == 2  # each of the two to itself


def test_numbers_reach_as_far_as_their_largest_scale() -> None:
    group, values = tables_module.number_classes(np.array([0.0, 20.0]))
    found = tables_module.numerical(values, [1.0, 5.0], "price")
    want = (math.exp(-20) + math.exp(-4)) / 2
    assert found[group[0], group[1]] == pytest.approx(want)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_infinite_cells_are_missing(tmp_path: Path) -> None:
    """RecBole would put the mean, which is infinite or no number, in empty cells."""
    made = tables()
    made["item"]["price:float"] = [5.0, "inf", "-inf", "", *[2.0] * (len(made["item"]) - 4)]
    made["inter"]["stars:float"] = ["inf", *[3.0] * (len(made["inter"]) - 1)]
    made = open_shop(write(tmp_path, made), relations=["price", "stars"])
    dataset, (price, stars) = made.dataset, made.model.lookup.heads
    missing = dataset.missing["price"]
    assert missing.sum() == 3 + 2  # padding and the item without a row
    assert torch.isfinite(dataset.item_feat["price"]).all()
    assert not price.table.known[missing].any() and price.table.known[~missing].all()
    assert (~np.isfinite(stars.values)).sum() == 1
