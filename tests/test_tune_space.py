"""Spaces of a search: files, messages that name the line, conditions, draws. No Ray here."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shop

from recbole_pos.cli.main import main
from recbole_pos.config.arguments import SearchArguments
from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.files import only_writer
from recbole_pos.model.models import MODELS
from recbole_pos.runs.searchers import OptunaSearcher, make_searcher
from recbole_pos.runs.space import Parameter, Space, parse_space, read_space, space_file
from recbole_pos.tuning.settings import SearchFolder, Settings, read_settings
from recbole_pos.tuning.tuning import _prepare, search
from recbole_pos.yaml_files import ROOT

ALL_KINDS = """
epochs: 7
learning_rate: {loguniform: [1e-4, 1e-2]}
hidden_dropout_prob: {uniform: [0.1, 0.4]}
attn_dropout_prob: {quniform: [0.0, 0.3, 0.1]}
n_layers: {randint: [1, 3]}
block: {choice: [transformer, hstu]}
"""


def write(folder: Path, text: str, name: str = "space.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def settings(
    file: Path | None, model: str = "PosSASRec", given: dict | None = None, **args: Any
) -> Settings:
    return read_settings(model, "ml-100k", file, [], given or {}, SearchArguments(**args))


def test_every_kind_is_drawn_within_its_range(tmp_path: Path) -> None:
    space = read_space(write(tmp_path, ALL_KINDS))
    assert space.fixed == {"epochs": 7}
    searcher = make_searcher("random", space, "max", 0)
    drawn = [searcher.ask(n) or {} for n in range(200)]
    rates = [options["learning_rate"] for options in drawn]
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)
    assert 0.4 < np.mean([rate < 1e-3 for rate in rates]) < 0.6  # half of them in each decade
    assert {options["attn_dropout_prob"] for options in drawn} == {0.0, 0.1, 0.2, 0.3}
    assert {options["n_layers"] for options in drawn} == {1, 2, 3}
    assert {options["block"] for options in drawn} == {"transformer", "hstu"}
    uniform = [options["hidden_dropout_prob"] for options in drawn]
    assert 0.1 <= min(uniform) < 0.13 < 0.37 < max(uniform) <= 0.4


def test_a_conditional_value_exists_only_under_its_condition(tmp_path: Path) -> None:
    text = (  # the child stands first: order in the file does not matter
        "kernel_band:\n  choice: [5, 9]\n"
        "  when: {kernel_u: toeplitz, kernel_l: [toeplitz, identity]}\n"
        "kernel_u: {choice: [toeplitz, full]}\n"
        "kernel_l: {choice: [toeplitz, full, identity]}\n"
    )
    space = settings(write(tmp_path, text), "KernelAttention").space
    tpe = OptunaSearcher(space, "max", 0)
    for options in [*(tpe.ask(n) for n in range(30)), *space.grid()]:
        holds = options["kernel_u"] == "toeplitz" and options["kernel_l"] != "full"
        assert ("kernel_band" in options) == holds, options
    assert len(space.grid()) == 2 * 2 + 4  # two of six pairs have a band, of two values each


def test_a_condition_may_name_what_the_command_line_gives(tmp_path: Path) -> None:
    text = "kernel_band: {choice: [5, 9], when: {kernel_l: toeplitz}}\nn_layers: {randint: [1, 2]}"
    file = write(tmp_path, text)
    toeplitz = settings(file, "KernelAttention", {"kernel_l": "toeplitz"}).space
    assert len(toeplitz.grid()) == 4
    with pytest.raises(UsageError, match=r"space.yaml, line 1: kernel_band.*never holds"):
        settings(file, "KernelAttention")  # full by default


LONG, WORD = "x" * 10_000, "x" * 500


@pytest.mark.parametrize(
    ("text", "line", "named"),
    [
        ("learning_rate: {loguniform: [1e-4, 1]}\nlearing_rate: {uniform: [0, 1]}", 2, "nearest"),
        ("learning_rate: {loguniform: [-8, 0]}", 1, "loguniform takes"),
        ("learning_rate: {quniform: [0, 1, 0]}", 1, "quniform takes"),
        ("learning_rate: {uniform: [1, 0]}", 1, "uniform takes"),
        ("n_layers: {choice: []}", 1, "different values"),
        ("n_layers: {choice: [1, 1]}", 1, "different values"),
        ("n_layers: {randint: [1, 2.5]}", 1, "randint takes"),
        ("n_layers: {chioce: [1, 2]}", 1, "did you mean choice"),
        ("n_layers: {choice: [1], randint: [1, 2]}", 1, "expected one of"),
        ("n_layers: {when: {block: hstu}}", 1, "expected one of"),
        ("n_layers: {randint: [1, 2]}\nn_layers: {randint: [1, 2]}", 2, "given twice"),
        ("n_layers: {randint: [0, 2]}", 1, "n_layers: expected 1 to 1,000"),
        ("n_layers: {choice: [1, 2], when: {nothing: 1}}", 1, "neither searched"),
        ("n_layers: {choice: [1, 2], when: {block: hsdu}}", 1, "never holds"),
        ("n_layers: {choice: [1], when: {n_heads: 1}}\nn_heads: {choice: [1], when: {n_layers: 1}}",
         1, "depends on itself"),
        ("epochs: {randint: [1, 9]}", 1, "cannot be searched"),
        ("eval_args: {choice: [{split: {RS: [8, 1, 1]}}]}", 1, "same for all trials"),
        ("n_layers: !!python/object/apply:os.system [ls]", 1, "not valid yaml"),
        ("1: {choice: [1]}", 1, "is text"),
        ("epochs: 3", 1, "searches nothing"),
        ("n_layers: {choice: [1, 2]}\nhidden_size: sixty", 2, "hidden_size"),
        ("hidden_size: {choice: [64, 48]}\nn_heads: {choice: [1, 3]}", 2, "64 is not .* n_heads 3"),
        ("hidden_size: {uniform: [8, 64]}", 1, "whole number"),
        (f"{WORD}: {{choice: [1]}}", 1, "at most 100"),
        (f"n_layers: {{{WORD}: [1], when: {{n_heads: 1}}}}", 1, "expected one of"),
        (f"n_layers: {{choice: [{LONG}, {LONG}]}}", 1, "different values"),
        (f"n_layers: {LONG}\nn_heads: {{choice: [1]}}", 1, "n_layers"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_named(tmp_path: Path, text: str, line: int, named: str) -> None:
    with pytest.raises(UsageError, match=rf"space.yaml, line {line}: .*{named}") as error:
        settings(write(tmp_path, text))
    assert len(str(error.value)) < 700 and len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("file", "model", "given", "named"),
    [("- a\n", "PosSASRec", {}, "must hold"),
     ("n_layers: {choice: [1, 2]}\n", "PosSASRec", {"n_layers": 1}, "nothing is left"),
     (Path("nowhere.yaml"), "PosSASRec", {}, "no file 'nowhere.yaml'"),
     (None, "Pop", {}, "Pop has no space")],
)  # fmt: skip
def test_no_space(tmp_path: Path, file: Any, model: str, given: dict, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        settings(write(tmp_path, file) if isinstance(file, str) else file, model, given)


def test_the_command_line_wins_over_the_space(tmp_path: Path) -> None:
    made = settings(write(tmp_path, ALL_KINDS), given={"epochs": 2, "n_layers": 2})
    assert made.epochs == 2 and made.base["n_layers"] == 2
    assert made.overruled == ["n_layers"] and "n_layers" not in made.space.names
    assert settings(write(tmp_path, ALL_KINDS)).epochs == 7


def test_metric_and_its_direction(tmp_path: Path) -> None:
    file = write(tmp_path, ALL_KINDS)
    made = settings(file, metric="mrr@20")
    assert (made.metric, made.mode, made.config()["valid_metric"]) == ("mrr@20", "max", "mrr@20")
    with pytest.raises(UsageError, match="valid_metric: 'mrr@7' is not computed"):
        settings(file, metric="mrr@7")
    lower = settings(file, given={"metrics": ["NDCG", "AveragePopularity"]},
                     metric="averagepopularity@10")  # fmt: skip
    assert lower.mode == "min"


@pytest.mark.parametrize(
    ("option", "value"),
    [("scheduler", "ahsa"), ("searcher", "tpe"), ("num_samples", 0), ("seed", -1), ("nproc", 0),
     ("gpus_per_trial", math.nan), ("cpus_per_trial", 1e-300), ("max_concurrent", 0)],
)  # fmt: skip
def test_wrong_options_of_the_search(tmp_path: Path, option: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"--{option}"):
        settings(write(tmp_path, ALL_KINDS), **{option: value})


def test_a_grid_has_its_own_number_of_trials(tmp_path: Path) -> None:
    text = "n_layers: {randint: [1, 3]}\nhidden_dropout_prob: {quniform: [0, 0.4, 0.2]}\n"
    file = write(tmp_path, text)
    made = settings(file, searcher="grid")
    grid = made.space.grid()
    assert made.num_samples == 9 and grid[1] == {"n_layers": 1, "hidden_dropout_prob": 0.2}
    with pytest.raises(UsageError, match="grid has 9 points"):
        settings(file, searcher="grid", num_samples=5)
    with pytest.raises(UsageError, match="line 2: learning_rate.*a grid needs values"):
        settings(write(tmp_path, ALL_KINDS.replace("epochs: 7\n", "")), searcher="grid")
    searcher = make_searcher("grid", Space(SEARCHED[:1]), "max", 0)
    assert [searcher.ask(n) for n in range(4)] == [*({"n_layers": n} for n in (1, 2, 3)), None]


def test_a_space_of_too_many_points_is_not_listed(tmp_path: Path) -> None:
    steps = "hidden_dropout_prob: {quniform: [0, 0.5, 1.0e-12]}\n"
    found = settings(write(tmp_path, steps))
    assert found.space.points() is None
    (parameter,) = found.space.parameters
    assert parameter.encode(parameter.decode(123_456_789_012)) == 123_456_789_012
    layers = "n_layers: {randint: [1, 50000]}\nseed: {randint: [1, 50000]}\n"
    for text in (steps, layers):
        with pytest.raises(UsageError):
            settings(write(tmp_path, text), searcher="grid")


def test_recbole_space_files(tmp_path: Path) -> None:
    """The example of RecBole's documentation; ends of loguniform are logarithms there."""
    text = (
        "learning_rate loguniform -8,0\nembedding_size choice [64,96 , 128]\n"
        "# a comment\n\ntrain_batch_size choice [512,1024,2048]\nmlp_hidden_size choice "
        "['[64, 64, 64]','[128, 128]']\ndropout_prob quniform 0.0,0.5,0.1\nstep uniform 1,2\n"
    )
    for name in ("model.hyper", "model.test"):
        space = read_space(write(tmp_path, text, name))
        values = {parameter.name: parameter.values for parameter in space.parameters}
        assert values["learning_rate"] == pytest.approx([math.exp(-8), 1.0])
        assert values["embedding_size"] == [64, 96, 128]
        assert values["mlp_hidden_size"] == [[64, 64, 64], [128, 128]]
        assert values["dropout_prob"] == [0.0, 0.5, 0.1] and values["step"] == [1, 2]
    for line in ("learning_rate loguniform", "learning_rate normal 0,1", "learning_rate choice [",
                 "learning_rate uniform __import__('os'),1", "learning_rate loguniform a,b",
                 "learning_rate loguniform 0,800", "a choice 1\na choice 2",
                 f"{LONG} choice 1"):  # fmt: skip
        with pytest.raises(UsageError, match=r"x.hyper, line [23]: ") as error:
            read_space(write(tmp_path, f"\n{line}\n", "x.hyper"))
        assert len(str(error.value)) < 700


@pytest.mark.parametrize("file", sorted((ROOT / "tune").glob("*.yaml")), ids=lambda f: f.stem)
def test_spaces_that_come_along_are_valid(file: Path) -> None:
    made = settings(None, file.stem)
    assert isinstance(made, Settings) and len(made.space.names) >= 3
    assert made.epochs <= 300 and made.base["stopping_step"] <= 10
    assert f"recbole-pos tune -m {file.stem} " in file.read_text()


def test_every_model_of_the_plugin_has_a_space(tmp_path: Path, monkeypatch) -> None:
    there = {file.stem for file in (ROOT / "tune").glob("*.yaml")}
    assert there >= {*MODELS, "SASRec", "GRU4Rec", "SRGNN", "NARM"}
    monkeypatch.chdir(tmp_path)  # an installed plugin works anywhere
    assert space_file("properties/tune/FPARec.yaml", "x") == space_file(None, "FPARec")


def test_a_search_belongs_to_its_attributes(tmp_path: Path) -> None:
    """As a trained model does: later trials would learn from other data than earlier ones."""
    made = shop.tables()
    given = shop.shop_options(shop.write(tmp_path, made))
    begun = read_settings("AttrFormer", "shop", None, [], given, SearchArguments())
    _prepare(begun)
    SearchFolder(tmp_path).settings.write_text(json.dumps(asdict(begun)))
    _prepare(SearchFolder(tmp_path).read())
    made["item"]["brand:token"] = made["item"]["brand:token"].to_numpy()[::-1]
    shop.write(tmp_path, made)
    with pytest.raises(UsageError, match="values of brand, or .* have changed since the search"):
        _prepare(SearchFolder(tmp_path).read())


@pytest.mark.parametrize(
    ("kind", "values", "inside", "outside"),
    [("choice", [1, "a"], "a", "b"), ("loguniform", [0.1, 0.4], 0.4, 0.41),
     ("randint", [1, 3], 2, 2.5), ("quniform", [0.0, 0.3, 0.1], 0.2, 0.25)],
)  # fmt: skip
def test_what_can_be_drawn(kind: str, values: list, inside: Any, outside: Any) -> None:
    """What a pack or a condition says of a parameter is held against it."""
    parameter = Parameter("x", kind, values, "here")
    assert parameter.has(inside) and not parameter.has(outside) and not parameter.has(None)


def test_a_folder_and_a_storage_are_of_one_search(tmp_path: Path) -> None:
    """And of no run, and of one process at a time."""
    file, storage = write(tmp_path, ALL_KINDS), str(tmp_path / "storage")
    made = settings(file)
    folder = SearchFolder.create(tmp_path / "s", made)
    assert folder.read() == made
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UsageError, match="holds a search"):
        RunFolder.create(folder.path, "tiny", "FPARec")
    for taken, of_what in ((folder.path, "holds a search"), (tmp_path, "holds a run already")):
        with pytest.raises(UsageError, match=of_what):
            SearchFolder.create(taken, made)
    with only_writer(folder.path, "searched"):
        with pytest.raises(UsageError, match=r"is being searched by process \d+"):
            search(resume=folder.path)
    SearchFolder.create(tmp_path / "a/s", settings(file, storage=storage))
    (tmp_path / "storage/s/00000").mkdir()
    with pytest.raises(UsageError, match="--storage"):
        SearchFolder.create(tmp_path / "b/s", settings(file, storage=storage))
    SearchFolder.create(tmp_path / "b/t", settings(file, storage=storage))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("PosSASRec", "position: [kernel]\nkernel_u: {choice: [toeplitz, full]}"),
        ("PosSASRec", "kernel_l: full\nposition: [kernel]\nn_layers: {choice: [1, 2]}"),
        ("PosSASRec", "loss_type: SCE\nbucket_size_y: {choice: [64, 128]}"),
        ("PosSASRec", "hidden_size: 32\nn_heads: {choice: [1, 4], when: {hidden_size: 32}}"),
    ],
)
def test_fixed_options_hold_for_what_is_searched(tmp_path: Path, model: str, text: str) -> None:
    """A parameter, its condition or another fixed option may need them."""
    found = settings(write(tmp_path, text), model)
    assert found.base.items() >= found.space.fixed.items() and found.space.points()


LEARNING = "learning_rate: {choice: [0.01, 0.001]}\n"


def test_a_split_of_the_space_stays(tmp_path: Path) -> None:
    """Key by key, as from any two sources; what is given wins."""
    file = write(tmp_path, LEARNING + "eval_args: {split: {GT: [0.8, 0.9]}}\n")
    both = settings(file, given={"eval_args": {"cold_items": "keep"}}).config()
    assert both["eval_args"]["split"] == {"GT": [0.8, 0.9]}
    assert both["eval_args"]["cold_items"] == "keep"
    given = {"eval_args": {"split": {"LS": "valid_and_test"}}}
    assert settings(file, given=given).config()["eval_args"]["split"] == given["eval_args"]["split"]


def test_parts_of_a_file_for_one_scheme(tmp_path: Path) -> None:
    """A trial has other schemes than the configuration the file was read for."""
    parts = "for:\n  PosSASRec: {n_layers: 1}\n  rope: {rope_base: 100}\n"
    mine = write(tmp_path, parts, "mine.yaml")
    space = write(tmp_path, "position: {choice: [[rope], [learned]]}\n")

    def both(**given: Any) -> Settings:
        return read_settings("PosSASRec", "ml-100k", space, [str(mine)], given, SearchArguments())

    with pytest.raises(UsageError, match="mine.yaml, for rope: a search that tries or sets"):
        both()
    space.write_text(LEARNING)
    found = both(position=["rope"]).config()
    assert found["rope_base"] == 100 and found["n_layers"] == 1


def test_relative_files_are_found_from_the_folders_of_trials(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = settings(write(tmp_path, LEARNING), given={"item_vectors": "vectors.npy"})
    assert made.base["item_vectors"] == str(tmp_path / "vectors.npy")


def test_conditions_of_conditions_hold_together() -> None:
    """What a parent's own condition asks for does not overrule what the child asks for."""
    a, b = Parameter("a", "choice", [1, 2], "f"), ("b", "choice", [1, 2], "f")
    c = Parameter("c", "choice", [5], "f", {"a": [2], "b": [1]})
    space = Space([a, Parameter(*b, {"a": [1, 2]}), c])
    for parameter, options in space.combinations():
        assert space.exists(parameter, {k: v for k, v in options.items() if k != parameter.name})
    with pytest.raises(UsageError, match="never holds"):
        list(Space([a, Parameter(*b, {"a": [1]}), c]).combinations())
    rate = Parameter("rate", "uniform", [0.1, 1], "f")
    with pytest.raises(UsageError, match="never holds"):
        list(Space([rate, Parameter("x", "choice", [1], "f", {"rate": [5]})]).combinations())


def test_points_of_a_space() -> None:
    """Fifty under conditions, though the product of all counts is half a million."""
    space: dict[str, Any] = {"base": {"choice": list("abcde")}}
    for name in "abcde":
        space[name] = {"choice": list(range(10)), "when": {"base": name}}
    assert parse_space(space, {}).points() == 50
    many = [Parameter(f"x{n}", "randint", [1, 10], "f") for n in range(5)]
    assert Space(many).points() is None and Space(many[:4]).points() == 10_000
    assert Parameter("x", "quniform", [0, 0.5, 0.2], "f").ends() == [0, 0.4]


SEARCHED = [
    Parameter("n_layers", "choice", [1, 2, 3], "here"),
    Parameter("dropout", "quniform", [0.0, 0.5, 0.1], "here"),
    Parameter("window", "randint", [3, 9], "here", {"n_layers": [2]}),
    Parameter("learning_rate", "loguniform", [1e-4, 1e-1], "here"),
]


@pytest.mark.parametrize("name", ["optuna", "random", "grid"])
def test_a_searcher_recalls_what_it_asked(name: str) -> None:
    """A new one stands as the old one did: the same trials and results; new ones differ."""
    space = Space(SEARCHED[:3] if name == "grid" else SEARCHED)
    old, new = (make_searcher(name, space, "max", 3) for _ in range(2))
    asked = [old.ask(number) or {} for number in range(8)]
    assert len({str(options) for options in asked}) > 6
    for number, options in enumerate(asked):
        new.recall(number, options)
    for searcher in (old, new):
        for number, score in {0: 0.0, 2: 0.2, 3: 0.3, 1: None}.items():
            searcher.tell(number, score)
    if isinstance(old, OptunaSearcher) and isinstance(new, OptunaSearcher):
        trials = [
            [(t.number, t.state, t.params, t.value) for t in searcher.study.trials]
            for searcher in (old, new)
        ]
        assert trials[0] == trials[1] and set(old.asked) == set(new.asked)
        other = OptunaSearcher(space, "max", 4)  # what was asked, not what it would ask
        for number, trial in enumerate(old.study.trials):
            other.recall(number, asked[number])
            assert other.study.trials[number].params == trial.params
    assert new.ask(8) == old.ask(8)


def test_random_trials_depend_on_seed_and_number_alone(tmp_path: Path) -> None:
    """And do not repeat; where there are few, they end when all are drawn."""
    text = (
        "kernel_u: {choice: [toeplitz, full]}\nn_layers: {randint: [1, 3]}\n"
        "kernel_band: {choice: [5, 9], when: {kernel_u: toeplitz}}\n"
    )
    found = settings(write(tmp_path, text), "KernelAttention", searcher="random")
    assert found.space.points() == found.num_samples == 3 * 2 + 3
    one, two, other = (make_searcher("random", found.space, "max", seed) for seed in (0, 0, 1))
    drawn = []
    for n in range(9):
        drawn.append(one.ask(n))
        one.tell(n, 0.1)
    assert drawn == [two.ask(n) for n in range(9)] != [other.ask(n) for n in range(9)]
    assert all(options in drawn for options in found.space.grid()) and one.ask(9) is None


def test_optuna_learns_and_knows_failures() -> None:
    searcher = OptunaSearcher(Space([Parameter("rate", "uniform", [1e-4, 1.0], "f")]), "min", 0)
    found = []
    for n in range(40):
        found.append(searcher.ask(n)["rate"])
        searcher.tell(n, found[-1])
    assert np.mean(found[-10:]) < 0.5 * np.mean(found[:10])
    searcher.ask(40)
    searcher.tell(40, math.nan)
    searcher.tell(40, 0.0)  # a second word about the same trial
    assert [trial.state.name for trial in searcher.study.trials[-1:]] == ["FAIL"]


@pytest.mark.parametrize("how", [["--seed=5"], ["--seed", "5"]])
def test_the_seed_of_the_command_is_that_of_the_search(how: list[str], monkeypatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr("recbole_pos.tuning.search", lambda *a, **k: called.append((a, k)))
    assert main(["tune", "-m", "FPARec", "-d", "tiny", *how, "--epochs=3"]) == 0
    assert called[0][1]["settings"].seed == 5 and called[0][0][4] == {"epochs": 3}
