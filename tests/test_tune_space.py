"""Spaces of a search: files, messages that name the line, conditions, draws. No Ray here."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import shop

from recbole_pos.config.arguments import SearchArguments
from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.model.models import MODELS
from recbole_pos.position.time_rotary import _share
from recbole_pos.tune.driver import _prepare
from recbole_pos.tune.files import read_space, space_file
from recbole_pos.tune.settings import SearchFolder, Settings, read_settings
from recbole_pos.tune.space import Space
from recbole_pos.yaml_files import ROOT, parse_scalar

OTHERS = {
    "num_samples": None,
    "max_concurrent": None,
    "metric": None,
    "scheduler": "asha",
    "grace_epochs": 5,
    "searcher": "optuna",
    "seed": 0,
    "storage": None,
    "cpus_per_trial": 1,
    "gpus_per_trial": 0,
    "nproc": 1,
}
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


def settings(file: Path | None, model: str = "PosSASRec", given: dict | None = None, **others):
    return read_settings(
        model, "ml-100k", file, [], given or {}, SearchArguments(**{**OTHERS, **others})
    )


def test_the_space_of_torope_tells_its_ratios_apart() -> None:
    """With two heads, split_head has one of either kind for every ratio."""
    found = settings(None, "TORoPE")
    heads = found.config({"fusion": "split_head"})["n_heads"]
    ratios = next(p for p in found.space.parameters if p.name == "time_ratio").values
    assert len({_share(ratio, heads, "", "") for ratio in ratios}) == 3


def test_the_command_of_posrec_searches_all_of_its_space() -> None:
    """As its file prints it; the presets would overrule most of it."""
    comment = re.sub(r"\n# *|\\", " ", (ROOT / "tune" / "PosRec.yaml").read_text(encoding="utf-8"))
    command = re.search(r"recbole-pos tune (.*?)  *Position", comment).group(1)
    words = shlex.split(command)
    assert words[:4] == ["-m", "PosRec", "-d", "diginetica"]
    given = dict(word.removeprefix("--").split("=", 1) for word in words[4:])
    given = {key: parse_scalar(value, key) for key, value in given.items()}
    found = settings(None, "PosRec", given)
    assert found.overruled == [] and found.metric == "mrr@10" and found.epochs == 30
    names = ["learning_rate", "weight_decay", "lambda_2", "hidden_dropout_prob", "messages"]
    assert found.space.names == names
    assert found.config()["eval_args"]["split"] == {"ST": [176670, 186670]}


def test_every_kind_is_drawn_within_its_range(tmp_path: Path) -> None:
    space = read_space(write(tmp_path, ALL_KINDS))
    assert space.fixed == {"epochs": 7}
    drawn = [space.draw(np.random.default_rng(seed)) for seed in range(300)]
    rates = [options["learning_rate"] for options in drawn]
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)
    assert 0.4 < np.mean([rate < 1e-3 for rate in rates]) < 0.6  # half of them in each decade
    assert {options["attn_dropout_prob"] for options in drawn} == {0.0, 0.1, 0.2, 0.3}
    assert {options["n_layers"] for options in drawn} == {1, 2, 3}
    assert {options["block"] for options in drawn} == {"transformer", "hstu"}
    uniform = [options["hidden_dropout_prob"] for options in drawn]
    assert min(uniform) < 0.13 < 0.37 < max(uniform) and 0.1 <= min(uniform) <= max(uniform) <= 0.4


def test_a_conditional_value_exists_only_under_its_condition(tmp_path: Path) -> None:
    text = (  # the child stands first: order in the file does not matter
        "kernel_band:\n  choice: [5, 9]\n"
        "  when: {kernel_u: toeplitz, kernel_l: [toeplitz, identity]}\n"
        "kernel_u: {choice: [toeplitz, full]}\n"
        "kernel_l: {choice: [toeplitz, full, identity]}\n"
    )
    space = settings(write(tmp_path, text), "KernelAttention").space
    for options in [space.draw(np.random.default_rng(seed)) for seed in range(60)] + space.grid():
        holds = options["kernel_u"] == "toeplitz" and options["kernel_l"] != "full"
        assert ("kernel_band" in options) == holds, options
    assert len(space.grid()) == 2 * 2 + 4  # two of six pairs have a band, of two values each


def test_a_condition_may_name_what_the_command_line_gives(tmp_path: Path) -> None:
    text = (
        "kernel_band: {choice: [5, 9], when: {kernel_l: toeplitz}}\nn_layers: {randint: [1, 2]}\n"
    )
    file = write(tmp_path, text)
    toeplitz = settings(file, "KernelAttention", {"kernel_l": "toeplitz"}).space
    assert len(toeplitz.grid()) == 4
    with pytest.raises(UsageError, match=r"space.yaml, line 1: kernel_band.*never holds"):
        settings(file, "KernelAttention")  # full, unless told otherwise


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("learning_rate: {loguniform: [1e-4, 1]}\nlearing_rate: {uniform: [0, 1]}", 2, "nearest"),
        ("a: 1\n\nn_layers: {randint: [3, 1]}", 3, "from 3 to 1 is empty"),
        ("n_layers: {randint: [1, 2.5]}", 1, "whole numbers"),
        ("learning_rate: {loguniform: [-8, 0]}", 1, "above 0"),
        ("learning_rate: {uniform: [0.1]}", 1, r"takes \[low, high\]"),
        ("learning_rate: {uniform: [0.1, 0.1]}", 1, "empty"),
        ("learning_rate: {uniform: 3}", 1, "takes"),
        ("hidden_dropout_prob: {quniform: [0, 0.5, 0]}", 1, "step"),
        ("n_layers: {choice: []}", 1, "no values"),
        ("n_layers: {choice: [1, 1]}", 1, "listed twice"),
        ("n_layers: {chioce: [1, 2]}", 1, "did you mean choice"),
        ("n_layers: {when: {block: hstu}}", 1, "cannot search by"),
        ("n_layers: {choice: [1, 2], uniform: [0, 1]}", 1, "expected one of"),
        ("n_layers: {randint: [1, 2]}\nn_layers: {randint: [1, 2]}", 2, "given already"),
        ("n_layers: {randint: [0, 2]}", 1, "n_layers must be at least 1"),
        ("hidden_dropout_prob: {uniform: [0.0, 1.5]}", 1, "below 1"),
        ("n_layers: {choice: [1, two]}", 1, "expected a whole number"),
        ("block: {choice: [hstu, transfomer]}", 1, "did you mean transformer"),
        ("n_layers: 0\nhidden_size: {choice: [8]}", 1, "n_layers must be at least 1"),
        ("n_layers: {choice: [1, 2], when: {nothing: 1}}", 1, "neither searched"),
        ("n_layers: {choice: [1, 2], when: {block: hsdu}}", 1, "never holds"),
        ("n_layers: {choice: [1], when: {n_heads: 1}}\nn_heads: {choice: [1], when: {n_layers: 1}}",
         1, "depends on itself"),
        ("epochs: {randint: [1, 9]}", 1, "cannot be searched"),
        ("eval_args: {choice: [{split: {RS: [8, 1, 1]}}]}", 1, "same for all trials"),
        ("user_inter_num_interval: {choice: ['[5,inf)']}", 1, "same for all trials"),
        ("n_layers: {choice: [1, 2]", 1, "not valid yaml"),
        ("n_layers: !!python/object/apply:os.system [ls]", 1, "not valid yaml"),
        ("1: {choice: [1]}", 1, "is text"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_named(tmp_path: Path, text: str, line: int, message: str) -> None:
    with pytest.raises(UsageError, match=rf"space.yaml, line {line}: .*{message}"):
        settings(write(tmp_path, text))


def test_a_space_that_searches_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="searches nothing"):
        settings(write(tmp_path, "epochs: 3\n"))
    with pytest.raises(UsageError, match="must hold"):
        settings(write(tmp_path, "- a\n"))
    with pytest.raises(UsageError, match="nothing is left"):
        settings(write(tmp_path, "n_layers: {choice: [1, 2]}\n"), given={"n_layers": 1})
    with pytest.raises(UsageError, match="no file 'nowhere.yaml'"):
        settings(Path("nowhere.yaml"))
    with pytest.raises(UsageError, match="Pop has no space"):
        settings(None, "Pop")


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
    ("others", "message"),
    [
        ({"scheduler": "ahsa"}, "did you mean asha"),
        ({"searcher": "tpe"}, "optuna, random, grid"),
        ({"num_samples": 0}, "--num_samples"),
        ({"max_concurrent": 0}, "--max_concurrent"),
        ({"grace_epochs": 0}, "--grace_epochs"),
        ({"cpus_per_trial": 0}, "--cpus_per_trial"),
        ({"nproc": 0}, "--nproc"),
        ({"gpus_per_trial": 1.5}, "--gpus_per_trial"),
        ({"gpus_per_trial": math.inf}, "--gpus_per_trial"),
        ({"gpus_per_trial": math.nan}, "--gpus_per_trial"),
        ({"cpus_per_trial": math.inf}, "--cpus_per_trial"),
        ({"cpus_per_trial": 1e-300}, "--cpus_per_trial"),
        ({"num_samples": []}, "--num_samples"),
        ({"max_concurrent": []}, "--max_concurrent"),
        ({"seed": -1}, "--seed"),
    ],
)
def test_wrong_options_of_the_search(tmp_path: Path, others: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        settings(write(tmp_path, ALL_KINDS), **others)


def test_a_grid_has_its_own_number_of_trials(tmp_path: Path) -> None:
    file = write(
        tmp_path, "n_layers: {randint: [1, 3]}\nhidden_dropout_prob: {quniform: [0, 0.4, 0.2]}\n"
    )
    made = settings(file, searcher="grid")
    assert made.total == 9 and made.space.grid()[1] == {"n_layers": 1, "hidden_dropout_prob": 0.2}
    with pytest.raises(UsageError, match="grid has 9 points"):
        settings(file, searcher="grid", num_samples=5)
    with pytest.raises(UsageError, match="line 2: learning_rate.*a grid needs values"):
        settings(write(tmp_path, ALL_KINDS.replace("epochs: 7\n", "")), searcher="grid")


LONG = "x" * 10_000


@pytest.mark.parametrize(
    "text",
    [
        f"{LONG}: {{choice: [1]}}",
        f"n_layers: {{choice: [1], {LONG}: 2}}",
        f"n_layers: {{{LONG}: [1], when: {{n_heads: 1}}}}",
        f"n_layers: {{uniform: {LONG}}}",
        f"n_layers: {{uniform: [1, {LONG}]}}",
        f"n_layers: {{choice: [{LONG}, {LONG}]}}",
        f"n_layers: {{loguniform: [-{'9' * 4000}, 1]}}",
        f"n_layers: {{choice: [1], when: {{{LONG}: 1}}}}",
        f"n_layers: {{choice: [1], when: {{n_layers: {LONG}}}}}",
        f"n_layers: {{choice: [1], when: {{n_heads: {LONG}}}}}",
        f"n_layers: [{LONG}",
        f"n_layers: {{choice: [{LONG}]}}",
        f"n_layers: {LONG}\nn_heads: {{choice: [1]}}",
    ],
)
def test_a_message_quotes_the_beginning_of_a_long_value(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError) as error:
        settings(write(tmp_path, text))
    assert len(str(error.value)) < 700 and len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("line", [f"x {LONG} 1,2", f"{LONG} choice 1", LONG, "x loguniform 1,1e9"])
def test_a_message_quotes_the_beginning_of_a_long_line_of_recbole(
    tmp_path: Path, line: str
) -> None:
    with pytest.raises(UsageError) as error:
        read_space(write(tmp_path, line, "x.hyper"))
    assert len(str(error.value)) < 700


def test_a_space_of_too_many_points_is_not_listed(tmp_path: Path) -> None:
    steps = "hidden_dropout_prob: {quniform: [0, 0.5, 1.0e-12]}\n"
    found = settings(write(tmp_path, steps))
    assert found.space.points() is None
    (parameter,) = found.space.parameters
    assert parameter.suggested(parameter.on_grid(123_456_789_012)) == 123_456_789_012
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
    for line, message in (
        ("learning_rate loguniform", "expected `option kind values`"),
        ("learning_rate normal 0,1", "unknown kind 'normal'"),
        ("learning_rate uniform __import__('os'),1", "takes"),
        ("learning_rate choice [", "begins like a list"),
        ("learning_rate loguniform a,b", "low,high"),
    ):
        with pytest.raises(UsageError, match=rf"x.hyper, line 2: .*({message})"):
            read_space(write(tmp_path, f"\n{line}\n", "x.hyper"))


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


def test_a_space_survives_a_file(tmp_path: Path) -> None:
    space = settings(write(tmp_path, ALL_KINDS)).space
    again = Space.from_plain(space.to_plain())
    rng = np.random.default_rng
    assert again.draw(rng(3)) == space.draw(rng(3)) and again.names == space.names


def test_a_search_belongs_to_its_attributes(tmp_path: Path) -> None:
    """As a trained model does: later trials would learn from other data than earlier ones."""
    made = shop.tables()
    given = shop.shop_options(shop.write(tmp_path, made))
    begun = read_settings("AttrFormer", "shop", None, [], given, SearchArguments(**OTHERS))
    _prepare(begun)
    SearchFolder(tmp_path).settings.write_text(json.dumps(begun.to_plain()))
    _prepare(SearchFolder(tmp_path).read())
    made["item"]["brand:token"] = made["item"]["brand:token"].to_numpy()[::-1]
    shop.write(tmp_path, made)
    with pytest.raises(
        UsageError, match="the values of brand, or .* have changed since the search began"
    ):
        _prepare(SearchFolder(tmp_path).read())


def test_one_process_at_a_time_searches_in_a_folder(tmp_path: Path) -> None:
    folder = SearchFolder(tmp_path)
    with folder.held():
        with pytest.raises(UsageError, match=r"is being searched by process \d+"):
            with SearchFolder(tmp_path).held():
                pass
    with SearchFolder(tmp_path).held():
        pass


def test_the_folder_of_a_search_is_not_that_of_a_run(tmp_path: Path) -> None:
    SearchFolder.create(tmp_path, settings(write(tmp_path, ALL_KINDS)))
    with pytest.raises(UsageError, match="holds a search"):
        RunFolder.create(tmp_path, "tiny", "FPARec")


def test_the_folder_of_a_run_is_not_that_of_a_search(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: FPARec")
    with pytest.raises(UsageError, match="holds a run already"):
        SearchFolder.create(tmp_path, settings(write(tmp_path, ALL_KINDS)))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("PosSASRec", "position: [kernel]\nkernel_u: {choice: [toeplitz, full]}"),
        ("PosSASRec", "kernel_l: full\nposition: [kernel]\nn_layers: {choice: [1, 2]}"),
        ("PosSASRec", "loss_type: SCE\nbucket_size_y: {choice: [64, 128]}"),
        (
            "PosSASRec",
            "hidden_size: 32\nhidden_dropout_prob: {choice: [0.1], when: {hidden_size: 32}}",
        ),
        (
            "KernelAttention",
            "kernel_l: toeplitz\nkernel_band: {choice: [5, 9], when: {kernel_l: toeplitz}}",
        ),
    ],
)
def test_fixed_options_hold_for_what_is_searched(tmp_path: Path, model: str, text: str) -> None:
    """A parameter, its condition or another fixed option may need them."""
    found = settings(write(tmp_path, text), model)
    assert found.base.items() >= found.space.fixed.items() and found.space.points()


def test_a_fixed_option_that_is_wrong_is_named_with_its_line(tmp_path: Path) -> None:
    file = write(tmp_path, "n_layers: {choice: [1, 2]}\nhidden_size: sixty")
    with pytest.raises(UsageError, match=r"space.yaml.* line 2: hidden_size"):
        settings(file)
