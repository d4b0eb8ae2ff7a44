"""Rows of a study from the command line: models, and values of options."""

from __future__ import annotations

import pytest

from recbole_pos.errors import UsageError
from recbole_pos.study.command import plan_of_models


def test_models_are_rows():
    plan = plan_of_models("ml-100k", ["FPARec", "SASRec"], seeds=3, base={"epochs": 2})
    assert list(plan.rows) == ["FPARec", "SASRec"] and plan.seeds == (2020, 2021, 2022)
    assert plan.options("SASRec") == {"model": "SASRec", "dataset": "ml-100k", "epochs": 2}
    assert plan.reference == "FPARec"


def test_values_are_rows():
    plan = plan_of_models("shop", ["PosSASRec"], ["position=[nope],[learned],[rope,kernel]"])
    assert [row.options["position"] for row in plan.rows.values()] == [
        ["nope"],
        ["learned"],
        ["rope", "kernel"],
    ]
    assert list(plan.rows) == ["nope", "learned", "rope+kernel"]
    plan = plan_of_models("shop", ["A", "B"], ["--lr=1e-3,0.01", "block=x,y"])
    assert list(plan.rows)[:2] == ["A lr=0.001 block=x", "A lr=0.001 block=y"]
    assert len(plan.rows) == 8 and plan.rows["B lr=0.01 block=y"].options["lr"] == 0.01


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        ("position", "expected option=value,value"),
        ("=1,2", "expected option=value,value"),
        ("position=[nope]", "expected two values or more"),
        ("position=[nope],[nope]", r"\['nope'\] is given twice"),
        ("position=[nope],[rope", "--vary: position: .* is no list of values"),
        ("position=", "expected two values or more"),
    ],
)
def test_what_cannot_be_varied(vary, message):
    with pytest.raises(UsageError, match=message):
        plan_of_models("shop", ["PosSASRec"], [vary])


def test_models_and_options_are_given_once():
    with pytest.raises(UsageError, match="SASRec is given twice"):
        plan_of_models("shop", ["SASRec", "SASRec"])
    with pytest.raises(UsageError, match="x is given twice"):
        plan_of_models("shop", ["SASRec"], ["x=1,2", "x=3,4"])
    with pytest.raises(UsageError, match="name the models"):
        plan_of_models("shop", [])
    with pytest.raises(UsageError, match="command line: there is no row 'Pop'"):
        plan_of_models("shop", ["SASRec"], reference="Pop")
