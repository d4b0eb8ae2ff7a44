"""Searched parameters by themselves: their ends, their grids, and conditions of conditions."""

from __future__ import annotations

import pytest

from recbole_pos.errors import UsageError
from recbole_pos.runs.space import Parameter, Space


def test_conditions_of_conditions_hold_together() -> None:
    """What a parent's own condition asks for does not overrule what the child asks for."""
    a, b = Parameter("a", "choice", [1, 2], "f"), ("b", "choice", [1, 2], "f")
    c = Parameter("c", "choice", [5], "f", {"a": [2], "b": [1]})
    space = Space([a, Parameter(*b, {"a": [1, 2]}), c])
    for parameter, options in space.combinations():
        assert space.exists(parameter, {k: v for k, v in options.items() if k != parameter.name})
    with pytest.raises(UsageError, match="never holds"):
        list(Space([a, Parameter(*b, {"a": [1]}), c]).combinations())


def test_ends_and_grids_of_parameters() -> None:
    assert Parameter("x", "quniform", [0, 0.5, 0.2], "f").ends() == [0, 0.4]
    assert Parameter("x", "randint", [2, 2], "f").all_values() == [2]
    with pytest.raises(UsageError, match="above 0"):
        Parameter("x", "loguniform", [0, 1], "f")
    many = [Parameter(f"x{n}", "randint", [1, 10], "f") for n in range(5)]
    assert Space(many).points() is None and Space(many[:4]).points() == 10_000
    assert Space([], {"epochs": 7}).without({"epochs": 1}).fixed == {}
    rate = Parameter("rate", "uniform", [0.1, 1], "f")
    with pytest.raises(UsageError, match="never holds"):
        list(Space([rate, Parameter("x", "choice", [1], "f", {"rate": [5]})]).combinations())
