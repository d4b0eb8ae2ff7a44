"""Studies as files: what is run, in which order, messages with their line."""

from __future__ import annotations

import ast
import copy
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

import recbole_pos.study
from recbole_pos.errors import UnknownKey, UsageError
from recbole_pos.study.expand import (
    check_plan,
    dry_run,
    dry_run_sentence,
    fits,
    with_unread,
)
from recbole_pos.study.plan import Attach, Plan, Ties
from recbole_pos.study.reading import make_plan, read_plan
from recbole_pos.study.report import protocol
from recbole_pos.study.results import Results
from recbole_pos.study.source import Source

STUDY = """\
title: Kernel attention, Table 2
dataset: amazon-beauty
base: {config_files: [kernel_attention/beauty.yaml], n_layers: 2}
rows:
  NoPE: {model: PosSASRec, position: [nope]}
  RoPE:
    model: PosSASRec
    position: [rope]
  Ours: {model: KernelAttention, config_files: own.yaml}
  RoPE + kernel: {attach: {to: RoPE, schemes: [kernel]}, learning_rate: 1e-4}
  Pop: {model: Pop, search: false}
search: {hidden_dropout_prob: [0.2, 0.3]}
seeds: [2020, 2021, 2022]
reference: NoPE
metrics: [NDCG@10, hit@10]
bins: {history: [5, 15], cold: true}
paper: {NoPE: {ndcg@10: 0.0316, HIT@10: 0.0571}}
split: {GT: [0.95, 0.97]}
ties: random(7)
tables:
  - {title: Table 2, rows: [NoPE, Ours]}
  - {rows: [RoPE, RoPE + kernel], metrics: [ndcg@10]}
"""


@pytest.fixture
def study(tmp_path: Path):
    """Reads a study's text."""

    def read(text: str = STUDY) -> Plan:
        file = tmp_path / "study.yaml"
        file.write_text(text)
        return read_plan(file)

    return read


# what a study says


def test_a_study_is_read_whole(study):
    plan = study()
    assert list(plan.rows) == ["NoPE", "RoPE", "Ours", "RoPE + kernel", "Pop"]
    assert plan.rows["RoPE + kernel"].attach == Attach("RoPE", ("kernel",))
    assert plan.rows["RoPE + kernel"].options == {"learning_rate": 1e-4}
    assert plan.seeds == (2020, 2021, 2022) and plan.reference == "NoPE"
    assert plan.metrics == ("ndcg@10", "hit@10")
    assert plan.paper == {"NoPE": {"ndcg@10": 0.0316, "hit@10": 0.0571}}
    assert plan.bins == {"history": [5, 15], "cold": True}
    assert plan.ties == Ties("random", 7) and str(plan.ties) == "random(7)"
    assert [table.reference for table in plan.tables] == ["NoPE", "RoPE"]
    assert plan.tables[1].title == "RoPE, RoPE + kernel"
    assert plan.options("Ours") == {
        "model": "KernelAttention",
        "dataset": "amazon-beauty",
        "n_layers": 2,
        "eval_args": {"split": {"GT": [0.95, 0.97]}, "ties": "random(7)"},
        "config_files": ["kernel_attention/beauty.yaml", "own.yaml"],
    }


def test_little_is_needed():
    content = {"dataset": "shop", "rows": {"A": {"model": "SASRec"}, "B": {"model": "Pop"}}}
    plan = make_plan(Source("here", content))
    assert plan.title == "2 rows on shop" and plan.reference == "A" and plan.seeds == (2020,)
    assert plan.tables[0].rows == ("A", "B") and plan.unit == "user" and plan.ties == Ties()


def test_rows_that_are_attached_come_after_what_they_are_attached_to(study):
    text = STUDY.replace("to: RoPE,", "to: late,") + "  "
    text = text.replace("  Pop:", "  late: {attach: {to: RoPE, schemes: [cape]}}\n  Pop:")
    plan = study(text)
    order = plan.order()
    assert order.index("RoPE") < order.index("late") < order.index("RoPE + kernel")
    assert plan.root("RoPE + kernel") == "RoPE"
    assert plan.coupled("RoPE + kernel", "late") and not plan.coupled("RoPE", "NoPE")
    done: set[str] = set()
    for fit in fits(plan):
        assert set(fit.after) <= done
        done.add(fit.name)


def test_fits_of_a_study(study):
    made = fits(study())
    trials = [fit for fit in made if fit.stage == "trial"]
    assert [(fit.row, fit.options["hidden_dropout_prob"]) for fit in trials] == [
        (row, value) for row in ("NoPE", "RoPE", "Ours") for value in (0.2, 0.3)
    ]
    assert {fit.seed for fit in trials} == {2020}
    rope = next(fit for fit in made if fit.name == "RoPE, seed 2021")
    assert rope.after == ("RoPE, trial 0", "RoPE, trial 1") and not rope.repeats
    assert next(fit for fit in made if fit.name == "RoPE, seed 2020").repeats
    attached = next(fit for fit in made if fit.name == "RoPE + kernel, seed 2022")
    assert attached.after == ("RoPE, seed 2022",) and attached.stage == "attach"
    assert attached.options == {"learning_rate": 1e-4, "attach": ["kernel"], "seed": 2022}
    finals = [fit.seed for fit in made if fit.stage != "trial"]
    assert finals == sorted(finals)  # a study that is cut short has whole rounds of seeds


def test_a_dry_run_says_how_much_it_is(study):
    plan = study()
    table = dry_run(plan).set_index("row")
    assert table["fits"].to_dict() == {
        "NoPE": 4,
        "RoPE": 4,
        "Ours": 4,
        "RoPE + kernel": 3,
        "Pop": 3,
    }
    assert table["trials"].to_dict()["Pop"] == 0 and table["after"]["RoPE + kernel"] == "RoPE"
    assert table["options"]["NoPE"] == "position: [nope]"
    assert table["search"]["NoPE"] == "hidden_dropout_prob: 0.2, 0.3"
    assert dry_run_sentence(plan) == (
        "Kernel attention, Table 2: 5 rows, 3 seeds, 18 fits (6 of a search, 12 after it) on "
        "amazon-beauty; differences are to NoPE"
    )


def test_a_space_has_a_budget(study):
    space = "search:\n  trials: 20\n  space:\n    learning_rate: {loguniform: [1e-4, 1e-2]}\n"
    plan = study(STUDY.replace("search: {hidden_dropout_prob: [0.2, 0.3]}\n", space))
    search = plan.rows["NoPE"].search
    assert search.trials == 20 and search.grid is None
    assert search.lines["learning_rate"].endswith("study.yaml, line 15")
    assert len(fits(plan)) == 3 * 20 + 15
    repeats = [fit.name for fit in fits(plan) if fit.repeats]  # tested only: a trial trained it
    assert repeats == [f"{row}, seed 2020" for row in ("NoPE", "RoPE", "Ours")]


# what is wrong is told with its line

WRONG = [
    ("title: K", "titel: K", 1, r"unknown key 'titel' \(did you mean title"),
    ("dataset: amazon-beauty\n", "", None, "dataset: give the name"),
    ("reference: NoPE", "reference: NoPe", 14, "there is no row 'NoPe'; nearest known: NoPE"),
    ("model: PosSASRec\n", "modle: PosSASRec\n", 6, r"row RoPE has no model \(is 'modle' the"),
    ("to: RoPE,", "to: Rope2,", 10, "there is no row 'Rope2'; nearest known: RoPE"),
    ("to: RoPE,", "ot: RoPE,", 10, r"unknown key 'ot' \(did you|unknown key 'ot'; there are to"),
    ("to: RoPE,", "to: RoPE + kernel,", 10, "attached to each other in a circle"),
    ("schemes: [kernel]}", "schemes: []}", 10, "attach: schemes is missing"),
    ("learning_rate: 1e-4", "position: [nope]", 10, "position is that of row RoPE"),
    ("learning_rate: 1e-4", "search: {x: [1]}", 10, "takes the configuration of row RoPE"),
    ("search: false", "search: {x: [1, 2, 3]}", 11, "searched with 3 trials and row NoPE with 2"),
    ("[0.2, 0.3]", "0.2", 12, "hidden_dropout_prob: expected a list of values, found 0.2"),
    ("[0.2, 0.3]", "[0.2, 0.2]", 12, "0.2 is listed twice"),
    ("[0.2, 0.3]", "{uniform: [0, 1]}", 12, "drawn, not listed"),
    ("{hidden_dropout_prob: [0.2, 0.3]}", "{space: tune.yaml}", 12, "needs a number of trials"),
    ("[2020, 2021, 2022]", "[2020, 2020]", 13, "different whole numbers"),
    ("[2020, 2021, 2022]", "0", 13, "expected how many"),
    ("NDCG@10", "NDCG", 15, "'NDCG' is no metric such as ndcg@10"),
    ("history: [5", "histroy: [5", 16, r"unknown kind of bins 'histroy' \(did you mean history"),
    ("[5, 15]", "[15, 5]", 16, "ascending"),
    ("cold: true", "cold: 3", 16, "cold is true or false"),
    ("paper: {NoPE", "paper: {NOPE2", 17, "there is no row 'NOPE2'"),
    ("0.0316", "high", 17, "ndcg@10 of row NoPE: expected a number, found 'high'"),
    ("random(7)", "random", 19, r"'random' is none of file, random\(SEED\), drop"),
    ("n_layers: 2}", "eval_args: {}}", 18, "eval_args is given in the base already, .*line 3"),
    ("n_layers: 2}", "seed: 2}", 3, "seed cannot stand here"),
    ("rows: [NoPE, Ours]", "rows: [NoPE, Our]", 21, "there is no row 'Our'"),
    ("rows: [NoPE, Ours]", "row: [NoPE, Ours]", 21, r"unknown key 'row' \(did you mean rows"),
    ("rows: [NoPE, Ours]", "validation: 1", 21, "true for a column of it, or false; found 1"),
    ("rows: [NoPE, Ours]", "rows: []", 21, "there is none in this table"),
    ("  NoPE: {", "  2: {", 5, "a name is text, found 2; write it in quotes"),
    ("  Ours: {", "  NoPE: {", 9, "'NoPE' is given twice"),
    ("title: K", "title: [K", 2, "not valid yaml"),
    ("title: Kernel attention, Table 2", "title: [a]", 1, "title: expected text"),
]


@pytest.mark.parametrize(("old", "new", "line", "message"), WRONG)
def test_what_is_wrong_is_told_with_its_line(study, old, new, line, message):
    assert old in STUDY
    where = rf"study\.yaml, line {line}: " if line else r"study\.yaml: "
    with pytest.raises(UsageError, match=rf"{where}.*(?:{message})"):
        study(STUDY.replace(old, new, 1))


ABSURD = [None, "", "x", -1, 3.5, True, [], {}, [[]], [None], {"a": None}, {"a": {"b": []}}, 10**40]


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to everything in a nested value."""
    inside = value.items() if isinstance(value, dict) else ()
    inside = enumerate(value) if isinstance(value, list) else inside
    return [path] * bool(path) + [p for key, part in inside for p in _places(part, (*path, key))]


@pytest.mark.parametrize("path", _places(yaml.safe_load(STUDY)), ids=str)
def test_whatever_stands_anywhere_is_taken_or_refused_in_words(path):
    for value in ABSURD:
        content = copy.deepcopy(yaml.safe_load(STUDY))
        inner = content
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        try:
            plan = make_plan(Source("here", content))
        except UsageError as error:
            assert str(error).startswith("here: ")  # noqa: PT017 (either is right)
        else:
            fits(plan), dry_run(plan), dry_run_sentence(plan)


@pytest.mark.parametrize(
    "text", ["", "- a\n", "a", "a: &x {b: *x}\n", "? [a]\n: b\n", "a: !!x {}\n"]
)
def test_what_is_no_study(study, text):
    with pytest.raises(UsageError, match="study.yaml"):
        study(text)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match="cannot read study .*none.yaml: No such file"):
        read_plan(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"title: \xe9\n")
    with pytest.raises(UsageError, match="cannot read study .*latin.yaml"):
        read_plan(tmp_path / "latin.yaml")


# against the models


def test_every_row_and_value_is_checked(study):
    seen = []

    def check(options: dict[str, Any]) -> dict[str, Any]:
        seen.append(options)
        return {**options, "complete": True}

    plan = study()
    found = check_plan(plan, check)
    assert set(found) == set(plan.rows) and found["Pop"]["complete"]
    assert [o["hidden_dropout_prob"] for o in seen if o["model"] == "KernelAttention"] == [0.2, 0.3]
    attached = found["RoPE + kernel"]
    assert attached["position"] == ["rope"] and attached["attach"] == ["kernel"]
    assert attached["hidden_dropout_prob"] == 0.2 and attached["learning_rate"] == 1e-4


@pytest.mark.parametrize(
    ("word", "line"),
    [("hidden_dropout_prob", 12), ("n_layers", 3), ("position", 8), ("whatever", 6)],
)
def test_what_the_models_refuse_is_told_with_its_line(study, word, line):
    def check(options: dict[str, Any]) -> dict[str, Any]:
        if options.get("position") == ["rope"]:
            raise UsageError(f"configuration: {word}: the model does not take it")
        return options

    with pytest.raises(UsageError, match=rf"study.yaml, line {line}: row RoPE: {word}: the model"):
        check_plan(study(), check)


def test_an_option_of_all_rows_goes_to_the_rows_that_read_it(study):
    def check(options: dict[str, Any]) -> dict[str, Any]:
        reads = {"Pop": (), "KernelAttention": ("n_layers",)}.get(
            options["model"], ("n_layers", "n_heads")
        )
        for key in ("n_heads", "n_layers", "n_beads"):
            if key in options and key not in reads:
                raise UnknownKey(f"configuration: unknown key {key!r}", key)
        return options

    text = STUDY.replace("n_layers: 2}", "n_heads: 4, n_layers: 2}")
    plan = with_unread(study(text), check)
    found = check_plan(plan, check)
    assert not {"n_heads", "n_layers"} & set(found["Pop"])
    assert "n_heads" not in found["Ours"] and found["Ours"]["n_layers"] == 2
    assert found["RoPE + kernel"]["n_heads"] == 4
    assert {row.name: row.unread for row in plan.rows.values() if row.unread} == {
        "Ours": ("n_heads",),
        "Pop": ("n_heads", "n_layers"),
    }
    told = " ".join(protocol(Results(plan=plan, runs=pd.DataFrame())))
    assert "n_heads 4 (not read by Ours and Pop), n_layers 2 (not read by Pop)" in told
    # one that nobody reads, or that is a row's own, is a mistake
    for wrong, line in (("n_heads: 4", 3), ("model: Pop", 11)):
        bad = study(text.replace(wrong, f"{wrong}, n_beads: 1"))
        with pytest.raises(UsageError, match=f"line {line}: .*unknown key 'n_beads'"):
            check_plan(with_unread(bad, check), check)
    both = study(text.replace("model: Pop", "model: Pop, n_heads: 1"))
    with pytest.raises(UsageError, match="line 11: row Pop: unknown key 'n_heads'"):
        check_plan(with_unread(both, check), check)


# the room


def test_plans_and_reports_need_neither_recbole_nor_torch_nor_ray():
    """What trains is apart: all else of a study stands on its own."""
    training = {"driver", "work", "spaces", "configs", "fitting", "progress", "folder", "collect"}
    training |= {"asked", "packed"}
    for file in sorted((Path(recbole_pos.study.__file__).parent).glob("*.py")):
        for node in ast.parse(file.read_text()).body if file.stem not in training else ():
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in getattr(node, "names", []) if not names]
            for name in names:
                outside = ("recbole_pos.study", "recbole_pos.errors", "recbole_pos.yaml_files")
                ours = name.startswith((*outside, "recbole_pos.values"))
                assert ours or not name.startswith("recbole"), file
                assert name.split(".")[0] not in ("torch", "ray"), file
