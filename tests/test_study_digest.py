"""When a run of a study is the same run."""

from __future__ import annotations

import pytest

from recbole_pos.errors import UsageError
from recbole_pos.study.expand import digest


def test_digest_is_of_values_not_of_how_they_are_written():
    one = {"a": 1, "b": [0.5, {"c": None}], "d": True}
    assert digest(one, "data") == digest({"d": True, "b": (0.5, {"c": None}), "a": 1.0}, "data")
    assert len(digest(one)) == 16
    others = [
        {**one, "a": 2},
        {**one, "a": True},
        {**one, "d": 1},
        {**one, "e": None},
        {**one, "b": [{"c": None}, 0.5]},
        {**one, "a": "1"},
        {**one, "a": float("inf")},
    ]
    assert len({digest(other, "data") for other in [one, *others]}) == len(others) + 1
    assert digest(one, "data") != digest(one, "other data") != digest(one)


def test_digest_stays_the_same_from_version_to_version():
    assert digest({"model": "SASRec", "lr": 1e-3}, "split") == "2e036afcd2f1a1f3"


def test_digest_takes_plain_values_only():
    with pytest.raises(UsageError, match="a.b: .* is no plain value"):
        digest({"a": {"b": object()}})
