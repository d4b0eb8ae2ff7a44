"""Studies as files: what is run, in which order, messages with their line."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from recbole_pos.errors import RunWarning, UnknownKey, UsageError
from recbole_pos.study.configs import check_plan, digest, digest_run, make_row_config, note_unread
from recbole_pos.study.plan import Attach, Plan, list_fits
from recbole_pos.study.study_file import change_plan, make_plan, plan_models, read_plan
from recbole_pos.study.study_source import Source

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
    def read(text: str = STUDY) -> Plan:
        file = tmp_path / "study.yaml"
        file.write_text(text)
        return read_plan(file)

    return read


def test_a_study_is_read_whole(study):
    plan = study()
    assert list(plan.rows) == ["NoPE", "RoPE", "Ours", "RoPE + kernel", "Pop"]
    assert plan.rows["RoPE + kernel"].attach == Attach(to="RoPE", schemes=("kernel",))
    assert plan.rows["RoPE + kernel"].options == {"learning_rate": 1e-4}
    assert plan.seeds == (2020, 2021, 2022) and plan.reference == "NoPE" and plan.unit == "user"
    assert plan.metrics == ("ndcg@10", "hit@10")
    assert plan.paper == {"NoPE": {"ndcg@10": 0.0316, "hit@10": 0.0571}}
    assert plan.bins == {"history": [5, 15], "cold": True}
    assert plan.ties == "random(7)"
    assert [table.reference for table in plan.tables] == ["NoPE", "RoPE"]
    assert plan.tables[1].title == "RoPE, RoPE + kernel"
    assert plan.make_options("Ours") == {
        "model": "KernelAttention",
        "dataset": "amazon-beauty",
        "n_layers": 2,
        "eval_args": {"split": {"GT": [0.95, 0.97]}, "ties": "random(7)"},
        "config_files": ["kernel_attention/beauty.yaml", "own.yaml"],
    }


def test_fits_come_after_what_they_start_from(study):
    text = STUDY.replace("to: RoPE,", "to: late,")
    plan = study(text.replace("  Pop:", "  late: {attach: {to: RoPE, schemes: [cape]}}\n  Pop:"))
    assert plan.list_ancestors("RoPE + kernel") == ["RoPE + kernel", "late", "RoPE"]
    assert plan.are_coupled("RoPE + kernel", "late") and not plan.are_coupled("RoPE", "NoPE")
    done: set[str] = set()
    for fit in list_fits(plan):
        assert set(fit.after) <= done
        done.add(fit.name)
    made = {fit.name: fit for fit in list_fits(plan)}
    trials = [fit for fit in made.values() if fit.stage == "trial"]
    assert [(fit.row, fit.options["hidden_dropout_prob"]) for fit in trials] == [
        (row, value) for row in ("NoPE", "RoPE", "Ours") for value in (0.2, 0.3)
    ]
    assert made["RoPE, seed 2021"].after == ("RoPE, trial 0", "RoPE, trial 1")
    attached = made["RoPE + kernel, seed 2022"]
    assert attached.after == ("late, seed 2022",) and attached.stage == "attach"
    assert attached.options == {"learning_rate": 1e-4, "attach": ["kernel"], "seed": 2022}
    finals = [fit.seed for fit in made.values() if fit.stage != "trial"]
    assert finals == sorted(finals)  # a study that is cut short has whole rounds of seeds


WRONG = [
    ("title: K", "titel: K", 1, "titel.*mean title"),
    ("dataset: amazon-beauty\n", "", None, "dataset"),
    ("reference: NoPE", "reference: NoPe", 14, "'NoPe'.*NoPE"),
    ("model: PosSASRec\n", "modle: PosSASRec\n", 6, "RoPE.*modle"),
    ("to: RoPE,", "to: RoPE + kernel,", 10, "circle"),
    ("search: false", "search: {x: [1, 2, 3]}", 11, "3 trials and NoPE with 2"),
    ("{hidden_dropout_prob: [0.2, 0.3]}", "{space: tune.yaml}", 12, "trials"),
    ("seeds: [2020, 2021, 2022]", "seeds: 3\nsearch_seeds: 4", 14, "search_seeds"),
    ("{hidden_dropout_prob: [0.2, 0.3]}", "{trials: 10000000000, space: a}", 12, "runs"),
    ("seeds: [2020, 2021, 2022]", "seeds: [1, 4294967296]", 13, "numbers below"),
    ("history: [5", "histroy: [5", 16, "histroy.*mean history"),
    ("n_layers: 2}", "eval_args: {}}", 18, "eval_args .*line 3"),
    ("  Ours: {", "  'Ours, seed 1': {", 9, "seed 0"),
    ("model: PosSASRec\n    position: [rope]", "retest: NoPE\n    epochs: 3", 8, "epochs"),
]


@pytest.mark.parametrize(("old", "new", "line", "message"), WRONG)
def test_an_error_names_line_and_key(study, old, new, line, message):
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


def test_whatever_stands_anywhere_is_taken_or_refused_in_words():
    whole = yaml.safe_load(STUDY)
    for path, value in itertools.product(_places(whole), ABSURD):
        inner = content = copy.deepcopy(whole)
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        try:
            plan = make_plan(Source("here", content))
        except UsageError as error:
            assert str(error).startswith("here: ")  # noqa: PT017 (either is right)
        else:
            list_fits(plan)


@pytest.mark.parametrize(
    "text", ["- a\n", "a: &x {b: *x}\n", "? [a]\n: b\n", "a: !!x {}\n", b"title: \xe9\n", None]
)
def test_files_that_are_no_study_are_refused(tmp_path, text):
    file = tmp_path / "study.yaml"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match="study.yaml"):
        read_plan(file)


FIRST = """\
dataset: ml-100k
base: {model: PosSASRec, epochs: 9, topk: [10]}
rows: {NoPE: {position: [nope]}, time: {position: [time_rope], n_layers: 3}}
seeds: 3
reference: time
paper: {NoPE: {ndcg@10: 0.1}, time: {ndcg@10: 0.2}}
tables: [{title: Both, rows: [NoPE, time]}, {title: To time, reference: time}]
"""


@pytest.fixture
def second(tmp_path: Path):
    """Reads a study that is like the first one."""

    def read(text: str) -> Plan:
        (tmp_path / "first.yaml").write_text(FIRST)
        (tmp_path / "second.yaml").write_text(text)
        return read_plan(tmp_path / "second.yaml")

    return read


def test_a_study_that_is_like_another_takes_over_option_by_option(second):
    """What belongs to rows or data that are left out goes with them."""
    plan = second("{like: first.yaml, base: {epochs: 2}, rows: {time: {n_layers: 1}, RoPE: }}")
    assert plan.seeds == (2020, 2021, 2022) and plan.reference == "time"
    assert plan.base.options == {"model": "PosSASRec", "epochs": 2, "topk": [10]}
    assert list(plan.rows) == ["NoPE", "time", "RoPE"]
    assert plan.rows["time"].options == {"position": ["time_rope"], "n_layers": 1}
    plan = second("{like: first.yaml, rows: [NoPE]}")
    assert list(plan.rows) == ["NoPE"] and plan.reference == "NoPE"
    assert plan.paper == {"NoPE": {"ndcg@10": 0.1}}
    assert [(one.title, one.rows) for one in plan.tables] == [("Both", ("NoPE",))]
    plan = second("{like: first.yaml, dataset: shop}")
    assert plan.dataset == "shop" and plan.paper == {} and len(plan.tables) == 2
    for text, message in (
        ("like: first.yaml\nrows: [Time]\n", "second.yaml, line 2: .*'Time'.*time"),
        ("like: second.yaml\n", "second.yaml, line 1: like: .*circle"),
    ):
        with pytest.raises(UsageError, match=message):
            second(text)


def test_models_and_values_are_rows(tmp_path):
    plan = plan_models("ml-100k", ["FPARec", "SASRec"], seeds=3, base={"epochs": 2})
    assert list(plan.rows) == ["FPARec", "SASRec"] and plan.seeds == (2020, 2021, 2022)
    assert plan.make_options("SASRec") == {"model": "SASRec", "dataset": "ml-100k", "epochs": 2}
    plan = plan_models("shop", ["PosSASRec"], ["position=[nope],[learned],[rope,kernel]"])
    assert list(plan.rows) == ["nope", "learned", "rope+kernel"]
    assert plan.rows["rope+kernel"].options["position"] == ["rope", "kernel"]
    plan = plan_models("shop", ["A", "B"], ["--lr=1e-3,0.01", "block=x,y"])
    assert list(plan.rows)[:2] == ["A lr=0.001 block=x", "A lr=0.001 block=y"]
    assert len(plan.rows) == 8 and plan.rows["B lr=0.01 block=y"].options["lr"] == 0.01
    base = {"metrics": ["Hit", "gauc", "NDCG"], "topk": [3, 5], "valid_metric": "NDCG@5"}
    assert plan_models("shop", ["A"], base=base).metrics == ("ndcg@5", "hit@3", "ndcg@3", "hit@5")
    assert plan_models("shop", ["A"], base={"topk": 7}).metrics == ("ndcg@7", "hit@7", "mrr@7")
    (file := tmp_path / "options.yaml").write_text("metrics: [MRR]\ntopk: [3]\n")
    base = {"config_files": [str(file)], "topk": 7}
    assert plan_models("shop", ["A"], base=base).metrics == ("mrr@7",)


@pytest.mark.parametrize(
    ("models", "vary", "message"),
    [
        (["A"], ["position=[nope],[nope]"], r"\['nope'\] is given twice"),
        (["A"], ["position=[nope],[rope"], "--vary: position"),
        (["A"], ["x=1,2", "x=3,4"], "x is given twice"),
        ([], [], "-m"),
        (["A"], ["epochs=1,2"], "epochs: it is given and varied"),
    ],
)
def test_what_cannot_be_varied(models, vary, message):
    with pytest.raises(UsageError, match=message):
        plan_models("shop", models, vary, base={"epochs": 9})


def test_given_options_are_above_those_of_the_base(tmp_path):
    """As those of given files are; an option that all rows set themselves changes nothing."""
    rows = {"A": {"model": "A", "epochs": 1, "n_heads": 2}, "B": {"model": "B", "n_heads": 2}}
    plan = make_plan(Source("a", {"dataset": "shop", "base": {"epochs": 2}, "rows": rows}))
    (file := tmp_path / "c.yaml").write_text("epochs: 11\n")
    assert "epochs" not in change_plan(plan, {}, {"config_files": [str(file)]}).base.options
    with pytest.warns(RunWarning, match="epochs: A of the study"):
        assert change_plan(plan, {}, {"epochs": 7}).base.options["epochs"] == 7
    with pytest.raises(UsageError, match="n_heads: changes nothing"):
        change_plan(plan, {}, {"n_heads": 4})
    with pytest.raises(UsageError, match="two bins would be 'age 1 d to 1 d'"):
        change_plan(plan, {"bins": {"age": [86400, 87000, 87500]}}, {})


@pytest.mark.parametrize("seeds", ["2", 2.5, True])
def test_what_is_no_number_of_seeds_is_refused_in_words(study, seeds):
    with pytest.raises(UsageError, match="seeds: expected how many"):
        change_plan(study(), {"seeds": seeds}, {})


def test_every_row_and_value_is_checked(study):
    seen = []

    def check(options: dict[str, Any]) -> dict[str, Any]:
        seen.append(options)
        return {**options, "complete": True}

    found = check_plan(study(), check)
    assert [o["hidden_dropout_prob"] for o in seen if o["model"] == "KernelAttention"] == [0.2, 0.3]
    attached = found["RoPE + kernel"]
    assert attached["position"] == ["rope"] and attached["attach"] == ["kernel"]
    assert attached["hidden_dropout_prob"] == 0.2 and attached["learning_rate"] == 1e-4

    def refuse(options: dict[str, Any]) -> dict[str, Any]:
        raise UsageError("configuration: hidden_dropout_prob: too large")

    with pytest.raises(UsageError, match="study.yaml, line 12: configuration NoPE: hidden_dropout"):
        check_plan(study(), refuse)


def test_an_option_of_all_rows_goes_to_the_rows_that_read_it(study):
    def check(options: dict[str, Any]) -> dict[str, Any]:
        reads = {"Pop": (), "KernelAttention": ("n_layers",)}
        for key in ("n_heads", "n_layers", "n_beads"):
            if key in options and key not in reads.get(options["model"], ("n_layers", "n_heads")):
                raise UnknownKey(f"configuration: unknown key {key!r}", key)
        return options

    text = STUDY.replace("n_layers: 2}", "n_heads: 4, n_layers: 2}")
    note_unread(plan := study(text), check)
    found = check_plan(plan, check)
    assert not {"n_heads", "n_layers"} & set(found["Pop"])
    assert "n_heads" not in found["Ours"] and found["Ours"]["n_layers"] == 2
    assert found["RoPE + kernel"]["n_heads"] == 4
    note_unread(bad := study(text.replace("model: Pop", "model: Pop, n_heads: 1")), check)
    with pytest.raises(UsageError, match="line 11: .*unknown key 'n_heads'"):  # a row's own
        check_plan(bad, check)


def test_digest_is_of_values_not_of_how_they_are_written():
    assert digest({"model": "SASRec", "lr": 1e-3}, "split") == "2e036afcd2f1a1f3"
    one = {"a": 1, "b": [0.5, {"c": None}], "d": True}
    assert digest(one, "data") == digest({"d": True, "b": (0.5, {"c": None}), "a": 1.0}, "data")
    changes: list[dict[str, Any]] = [{"a": 2}, {"a": True}, {"d": 1}, {"e": None}, {"a": "1"}]
    changes += [{"b": [{"c": None}, 0.5]}, {"a": float("inf")}]
    digests = {digest(other, "data") for other in [one, *({**one, **more} for more in changes)]}
    assert len(digests) == len(changes) + 1
    assert digest(one, "data") != digest(one, "other data") != digest(one)
    with pytest.raises(UsageError, match=r"a\.b"):
        digest({"a": {"b": object()}})


@pytest.mark.parametrize(
    ("model", "name"), [("FPARec", "a5c53560ac9dcbbc"), ("SASRec", "50a975b17e005ea1")]
)
def test_runs_of_0_2_keep_their_names(model, name):
    """An option that is new changes none where it is left out, so nothing is trained again."""
    assert (
        digest_run(make_row_config({"model": model, "dataset": "ml-100k"}), {"data": "x"}) == name
    )


def test_digest_is_of_the_content_of_vectors_wherever_they_lie(tmp_path):
    def name(file: str) -> str:
        options = {"model": "PosSASRec", "dataset": "ml-100k", "item_vectors": str(tmp_path / file)}
        return digest_run(make_row_config(options), {"data": "x"})

    for file, value in (("a.npy", 0), ("b.npy", 0), ("c.npy", 1)):
        np.save(tmp_path / file, np.full((2, 3), value))
        (tmp_path / file).with_suffix(".txt").write_text("i1\ni2\n")
    assert name("a.npy") == name("b.npy") != name("c.npy")
    (tmp_path / "b.txt").write_text("i2\ni1\n")
    assert name("a.npy") != name("b.npy")
