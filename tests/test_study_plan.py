"""Studies as files: what is run, in which order, messages with their line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recbole_pos.errors import RunWarning, UnknownKey, UsageError
from recbole_pos.study import configs
from recbole_pos.study.configs import check_plan, digest_run, exclude_unread, make_row_config
from recbole_pos.study.plan import Attach, Plan, Source, list_fits
from recbole_pos.study.study_file import change_plan, make_plan, plan_models, read_plan

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
    assert plan.metrics == ("ndcg@10", "hit@10")
    assert plan.paper == {"NoPE": {"ndcg@10": 0.0316, "hit@10": 0.0571}}
    assert [table.reference for table in plan.tables] == ["NoPE", "RoPE"]
    assert plan.tables[1].title == "RoPE, RoPE + kernel"
    assert plan.make_options("Ours") == {
        "model": "KernelAttention",
        "dataset": "amazon-beauty",
        "n_layers": 2,
        "config_files": ["kernel_attention/beauty.yaml", "own.yaml"],
    }


def test_fits_come_after_what_they_start_from(study):
    text = STUDY.replace("to: RoPE,", "to: late,")
    plan = study(text.replace("  Pop:", "  late: {attach: {to: RoPE, schemes: [cape]}}\n  Pop:"))
    assert plan.list_ancestors("RoPE + kernel") == ["RoPE + kernel", "late", "RoPE"]
    assert plan.are_coupled("RoPE + kernel", "late") and not plan.are_coupled("RoPE", "NoPE")
    made = {fit.name: fit for fit in list_fits(plan)}
    names = list(made)
    assert all(names.index(a) < names.index(fit.name) for fit in made.values() for a in fit.after)
    trials = [fit for fit in made.values() if fit.stage == "trial"]
    assert [(fit.row, fit.options["hidden_dropout_prob"]) for fit in trials] == [
        (row, value) for row in ("NoPE", "RoPE", "Ours") for value in (0.2, 0.3)
    ]
    assert made["RoPE, seed 2021"].after == ("RoPE, trial 0", "RoPE, trial 1")
    attached = made["RoPE + kernel, seed 2022"]
    assert attached.after == ("late, seed 2022",)
    assert attached.options == {"learning_rate": 1e-4, "attach": ["kernel"], "seed": 2022}
    finals = [fit.seed for fit in made.values() if fit.stage != "trial"]
    assert finals == sorted(finals)  # a study that is cut short has whole rounds of seeds


def test_an_error_names_line_and_key(study):
    for old, new, line, message in (
        ("title: K", "titel: K", 1, "titel.*mean title"),
        ("reference: NoPE", "reference: NoPe", 14, "'NoPe'.*NoPE"),
        ("model: PosSASRec\n", "modle: PosSASRec\n", 6, "RoPE: it has no model"),
        ("search: false", "search: {x: [1, 2, 3]}", 11, "Pop is searched with 3 trials and Ours"),
        ("{hidden_dropout_prob: [0.2, 0.3]}", "{x: {uniform: [0, 1]}}", 12, "a list of different"),
        ("model: PosSASRec\n    position: [rope]", "retest: NoPE\n    epochs: 3", 8, "epochs"),
        ("history: [5, 15]", "history: [15, 5]", 16, "expected edges between bins, ascending"),
        ("history: [5, 15]", "age: [86400, 87000, 87500]", 16, "with different names"),
    ):
        assert old in STUDY
        with pytest.raises(UsageError, match=rf"study\.yaml, line {line}: .*(?:{message})"):
            study(STUDY.replace(old, new, 1))


FIRST = """\
dataset: ml-100k
base: {model: PosSASRec, epochs: 9, topk: [10]}
rows: {NoPE: {position: [nope]}, time: {position: [time_rope], n_layers: 3}}
seeds: 3
reference: time
paper: {NoPE: {ndcg@10: 0.1}, time: {ndcg@10: 0.2}}
tables: [{title: Both, rows: [NoPE, time]}, {title: To time, reference: time}]
"""


def test_a_study_that_is_like_another_takes_over_option_by_option(tmp_path: Path):
    """What belongs to rows or data that are left out goes with them."""

    def second(text: str) -> Plan:
        (tmp_path / "first.yaml").write_text(FIRST)
        (tmp_path / "second.yaml").write_text(text)
        return read_plan(tmp_path / "second.yaml")

    plan = second("{like: first.yaml, base: {epochs: 2}, rows: {time: {n_layers: 1}, RoPE: }}")
    assert plan.seeds == (2020, 2021, 2022) and plan.reference == "time"
    assert plan.base.options == {"model": "PosSASRec", "epochs": 2, "topk": [10]}
    assert list(plan.rows) == ["NoPE", "time", "RoPE"]
    assert plan.rows["time"].options == {"position": ["time_rope"], "n_layers": 1}
    plan = second("{like: first.yaml, rows: [NoPE]}")
    assert list(plan.rows) == ["NoPE"] and plan.reference == "NoPE"
    assert plan.paper == {"NoPE": {"ndcg@10": 0.1}}
    assert [(one.title, one.rows) for one in plan.tables] == [(plan.title, ("NoPE",))]
    plan = second("{like: first.yaml, dataset: shop}")
    assert plan.dataset == "shop" and plan.paper == {} and len(plan.tables) == 2
    with pytest.raises(UsageError, match="second.yaml, line 2: .*'Time'.*time"):
        second("like: first.yaml\nrows: [Time]\n")
    with pytest.raises(UsageError, match="line 1: like: expected the file of another study"):
        second("like: third.yaml\n")


def test_models_and_values_are_rows(tmp_path):
    plan = plan_models("ml-100k", ["FPARec", "SASRec"], seeds=3, base={"epochs": 2})
    assert list(plan.rows) == ["FPARec", "SASRec"] and plan.seeds == (2020, 2021, 2022)
    plan = plan_models("shop", ["PosSASRec"], ["position=[nope],[learned],[rope,kernel]"])
    assert list(plan.rows) == ["nope", "learned", "rope+kernel"]
    assert plan.rows["rope+kernel"].options["position"] == ["rope", "kernel"]
    plan = plan_models("shop", ["A", "B"], ["--lr=1e-3,0.01", "block=x,y"])
    assert len(plan.rows) == 8 and plan.rows["B lr=0.01 block=y"].options["lr"] == 0.01
    base = {"metrics": ["Hit", "gauc", "NDCG"], "topk": [3, 5], "valid_metric": "NDCG@5"}
    assert plan_models("shop", ["A"], base=base).metrics == ("ndcg@5", "hit@3", "ndcg@3", "hit@5")
    (file := tmp_path / "options.yaml").write_text("metrics: [MRR]\ntopk: [3]\n")
    base = {"config_files": [str(file)], "topk": 7}
    assert plan_models("shop", ["A"], base=base).metrics == ("mrr@7",)
    with pytest.raises(UsageError, match="--vary: position: expected .* two different values"):
        plan_models("shop", ["A"], ["position=[nope],[nope]"])


def test_given_options_are_above_those_of_the_base(tmp_path):
    """As those of given files are, after its own; rows that set an option themselves are named."""
    rows = {"A": {"model": "A", "epochs": 1, "n_heads": 2}, "B": {"model": "B", "n_heads": 2}}
    one, three = (str(tmp_path / f"{name}.yaml") for name in ("one", "three"))
    for file in (one, three):
        Path(file).write_text("epochs: 11\n")
    base = {"epochs": 2, "config_files": [one, "two.yaml"]}
    plan = make_plan(Source("a", {"dataset": "shop", "base": base, "rows": rows, "seeds": [7, 8]}))
    changed = change_plan(plan, {"seeds": 3}, {"config_files": [one, three]})
    assert changed.base.config_files == ("two.yaml", one, three)
    assert "epochs" not in changed.base.options and changed.seeds == (7, 8, 9)
    assert change_plan(plan, {"seeds": 1}, {}).seeds == (7,)
    with pytest.warns(RunWarning, match="epochs: A of the study"):
        assert change_plan(plan, {}, {"epochs": 7}).base.options["epochs"] == 7


def test_every_row_and_value_is_checked(study, monkeypatch):
    seen = []

    def check(options: dict[str, Any]) -> dict[str, Any]:
        if options["model"] == "Pop":
            raise UsageError("configuration: hidden_dropout_prob: unknown")
        seen.append((options["model"], options["hidden_dropout_prob"]))
        return options

    monkeypatch.setattr(configs, "complete_options", check)
    with pytest.raises(UsageError, match="study.yaml, line 11: configuration Pop: hidden_dropout"):
        check_plan(study())
    assert {("KernelAttention", 0.2), ("KernelAttention", 0.3)} <= set(seen)


def test_an_option_of_all_rows_goes_to_the_rows_that_read_it(study, monkeypatch):
    def check(options: dict[str, Any]) -> dict[str, Any]:
        reads = {"Pop": (), "KernelAttention": ("n_layers",)}
        for key in ("n_heads", "n_layers", "n_beads"):
            if key in options and key not in reads.get(options["model"], ("n_layers", "n_heads")):
                raise UnknownKey(f"configuration: unknown key {key!r}", key)
        return options

    text = STUDY.replace("n_layers: 2}", "n_heads: 4, n_layers: 2}")
    monkeypatch.setattr(configs, "complete_options", check)
    exclude_unread(plan := study(text))
    found = check_plan(plan)
    assert not {"n_heads", "n_layers"} & set(found["Pop"])
    assert "n_heads" not in found["Ours"] and found["Ours"]["n_layers"] == 2
    assert found["RoPE + kernel"]["n_heads"] == 4


def name_run(identity: str = "x", **options: Any) -> str:
    config = make_row_config({"model": "FPARec", "dataset": "ml-100k", **options})
    return digest_run(config, {"data": identity})


def test_the_digest_of_a_run_is_of_what_changes_its_results():
    """An option at its default is left out, so that one that is new changes no digest."""
    assert name_run() == name_run(warmup_steps=0) == name_run(data_path="elsewhere")
    config = make_row_config({"model": "FPARec", "dataset": "ml-100k"})
    del config.plain["warmup_steps"]
    assert digest_run(config, {"data": "x"}) == name_run()
    names = [name_run(), name_run(warmup_steps=5), name_run(hidden_size=32), name_run(seed=1)]
    names += [name_run(identity="y"), digest_run(config, {"data": "x"}, True)]
    assert len(set(names)) == 6


def test_digest_is_of_the_content_of_vectors_wherever_they_lie(tmp_path):
    def name(file: str) -> str:
        return name_run(model="PosSASRec", item_vectors=str(tmp_path / file))

    for file, value in (("a.npy", 0), ("b.npy", 0), ("c.npy", 1)):
        np.save(tmp_path / file, np.full((2, 3), value))
        (tmp_path / file).with_suffix(".txt").write_text("i1\ni2\n")
    assert name("a.npy") == name("b.npy") != name("c.npy")
    (tmp_path / "b.txt").write_text("i2\ni1\n")
    assert name("a.npy") != name("b.npy")


def test_a_loss_that_is_given_is_another_run_only_for_a_large_catalogue():
    """There the default is SCE; on other data both are one run, with the name it always had."""
    for num_items, loss in ((1000, "CE"), (100_001, "SCE")):
        names = []
        for options in ({}, {"loss_type": loss}):
            config = make_row_config({"model": "FPARec", "dataset": "ml-100k", **options})
            config.adapt({"users": 1, "items": num_items, "events": 100})
            names.append(digest_run(config, {"data": "x"}))
        assert names[0] == names[1]
