"""Spaces of a search, and what its trials are given of the data. No Ray here."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
import shop
import torch
from optuna.samplers import RandomSampler

from recbole_pos.config.arguments import SearchArguments
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.splits import TEST
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import Experiment, prepare
from recbole_pos.runs.training_runs import SharedData
from recbole_pos.tuning.search_plan import plan_search
from recbole_pos.tuning.space import Space, read_space
from recbole_pos.tuning.trials import Trial, TrialTable
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


def search_of(
    file: Any,
    model: str = "PosSASRec",
    given: dict | None = None,
    files: Any = (),
    **args: Any,
) -> Any:
    """A search, with its space and the options of all trials."""
    search = plan_search(model, "ml-100k", file, files, given or {}, SearchArguments(**args))
    return SimpleNamespace(search=search, space=search.space, base=search.facts.options)


def sample(space: Space, number: int) -> list[dict]:
    """Options of so many trials, none of which ends."""
    study = optuna.create_study(sampler=RandomSampler(0))
    return [space.suggest(study.ask()) for _ in range(number)]


def test_every_kind_is_sampled_within_its_range(tmp_path: Path) -> None:
    space = read_space(write(tmp_path, ALL_KINDS))
    assert space.fixed == {"epochs": 7}
    drawn = sample(space, 200)
    rates = [options["learning_rate"] for options in drawn]
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)
    assert 0.4 < np.mean([rate < 1e-3 for rate in rates]) < 0.6  # half of them in each decade
    assert {options["attn_dropout_prob"] for options in drawn} == {0.0, 0.1, 0.2, 0.3}
    assert {options["n_layers"] for options in drawn} == {1, 2, 3}
    assert {options["block"] for options in drawn} == {"transformer", "hstu"}
    uniform = [options["hidden_dropout_prob"] for options in drawn]
    assert 0.1 <= min(uniform) < 0.13 < 0.37 < max(uniform) <= 0.4
    assert search_of({"n_layers": {"randint": [1, 3]}}).space.names == ["n_layers"]


def test_a_conditional_value_exists_only_under_its_condition(tmp_path: Path) -> None:
    text = (  # the child stands first: order in the file does not matter
        "kernel_band:\n  choice: [5, 9]\n"
        "  when: {kernel_u: toeplitz, kernel_l: [toeplitz, identity]}\n"
        "kernel_u: {choice: [toeplitz, full]}\n"
        "kernel_l: {choice: [toeplitz, full, identity]}\n"
    )
    space = search_of(write(tmp_path, text), "KernelAttention").space
    for options in sample(space, 30) + space.list_points():
        holds = options["kernel_u"] == "toeplitz" and options["kernel_l"] != "full"
        assert ("kernel_band" in options) == holds, options
    assert len(space.list_points()) == 2 * 2 + 4  # two of six pairs have a band, of two values each


def test_a_condition_may_name_what_the_command_line_gives(tmp_path: Path) -> None:
    text = "kernel_band: {choice: [5, 9], when: {kernel_l: toeplitz}}\nn_layers: {randint: [1, 2]}"
    file = write(tmp_path, text)
    toeplitz = search_of(file, "KernelAttention", {"kernel_l": "toeplitz"}).space
    assert len(toeplitz.list_points()) == 4
    with pytest.raises(UsageError, match=r"space.yaml, line 1: kernel_band.*never holds"):
        search_of(file, "KernelAttention")  # full by default


@pytest.mark.parametrize(
    ("text", "line", "named"),
    [
        ("n_layers: {randint: [1, 2]}\nlearing_rate: {uniform: [0, 1]}", 2, "did you mean"),
        ("n_layers: {randint: [0, 2]}", 1, "n_layers: expected int, 1 to 1,000"),
        ("n_layers: {choice: [1, 2], when: {nothing: 1}}", 1, "neither searched"),
        ("n_layers: {choice: [1], when: {n_heads: 1}}\nn_heads: {choice: [1], when: {n_layers: 1}}",
         1, "depends on itself"),
        ("epochs: {randint: [1, 9]}", 1, "cannot be searched"),
        ("eval_args: {choice: [{split: {RS: [8, 1, 1]}}]}", 1, "same for all trials"),
        ("hidden_size: {choice: [64, 48]}\nn_heads: {choice: [1, 3]}", 2, "64 is not .* n_heads 3"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_named(tmp_path: Path, text: str, line: int, named: str) -> None:
    with pytest.raises(UsageError, match=rf"space.yaml, line {line}: .*{named}"):
        search_of(write(tmp_path, text))


def test_the_command_line_wins_over_the_space(tmp_path: Path) -> None:
    """Key by key in eval_args."""
    text = ALL_KINDS + "eval_args: {split: {GT: [0.8, 0.9]}}\n"
    given: dict[str, Any] = {"epochs": 2, "n_layers": 2, "eval_args": {"cold_items": "keep"}}
    made = search_of(write(tmp_path, text), given={**given, "item_vectors": "vectors.npy"})
    assert made.base["epochs"] == 2 and made.base["n_layers"] == 2
    assert made.base["eval_args"] == {"split": {"GT": [0.8, 0.9]}, "cold_items": "keep"}
    assert Path(made.base["item_vectors"]).is_absolute()  # it may be resumed from elsewhere
    assert "n_layers" not in made.space.names
    with pytest.raises(UsageError, match="nothing is left"):
        search_of(write(tmp_path, "n_layers: {choice: [1, 2]}\n"), given={"n_layers": 1})
    for file, model in ((Path("Pop.yaml"), "FPARec"), (None, "Pop")):
        with pytest.raises(UsageError, match="--space: no file 'Pop.yaml'"):
            search_of(file, model)


def test_the_direction_of_a_search_is_that_of_its_metric(tmp_path: Path) -> None:
    given = {"metrics": ["NDCG", "AveragePopularity"], "valid_metric": "AveragePopularity@10"}
    search = search_of(write(tmp_path, ALL_KINDS), given=given).search
    table = TrialTable(tmp_path, search)
    table.trials = [Trial(n, {}, "finished", value) for n, value in enumerate((0.2, 0.1, 0.3))]
    assert table.find_best() == table.trials[1]


def test_a_grid_has_its_own_number_of_trials(tmp_path: Path) -> None:
    text = "n_layers: {randint: [1, 3]}\nhidden_dropout_prob: {quniform: [0, 0.4, 0.2]}\n"
    file = write(tmp_path, text)
    made = search_of(file, searcher="grid")
    grid = made.space.list_points()
    assert made.search.facts.num_samples == 9
    assert grid[1] == {"n_layers": 1, "hidden_dropout_prob": 0.2}
    assert search_of(file, searcher="grid", num_samples=5).search.facts.num_samples == 5
    with pytest.raises(UsageError, match="line 2: learning_rate.*a grid needs values"):
        search_of(write(tmp_path, ALL_KINDS.replace("epochs: 7\n", "")), searcher="grid")


@pytest.mark.parametrize("file", sorted((ROOT / "tune").glob("*.yaml")), ids=lambda f: f.stem)
def test_spaces_that_come_along_are_valid(file: Path) -> None:
    made = search_of(None, file.stem)
    assert len(made.space.names) >= 3
    assert made.base["epochs"] <= 300 and made.base["stopping_step"] <= 10


def test_parts_of_a_file_for_one_scheme(tmp_path: Path) -> None:
    """A trial has other schemes than the configuration the file was read for."""
    parts = "for:\n  PosSASRec: {n_layers: 1}\n  rope: {rope_base: 100}\n"
    mine = write(tmp_path, parts, "mine.yaml")
    space = write(tmp_path, "position: {choice: [[rope], [learned]]}\n")

    with pytest.raises(UsageError, match="mine.yaml, for rope: a search that tries or sets"):
        search_of(space, files=[str(mine)])
    write(tmp_path, "learning_rate: {choice: [0.01, 0.001]}\n")
    found = search_of(space, given={"position": ["rope"]}, files=[str(mine)])
    assert found.base["rope_base"] == 100 and found.base["n_layers"] == 1


def score(made: Experiment) -> dict[str, float]:
    return dict(made.trainer.evaluate(made.loaders["valid"], load_best_model=False))


@pytest.mark.parametrize(
    ("model", "split"), [("FPARec", {"LS": "valid_and_test"}), ("BPR", {"GT": [0.7, 0.85]})]
)
def test_what_trials_get_has_no_test_event(tiny: Path, split: dict, model: str) -> None:
    """And is otherwise the same: rows of training and validation, identity, catalogue."""
    options = {"data_path": str(tiny), "eval_args": {"split": split}}
    config = PosConfig(model, "tiny", None, options)
    whole = prepare(config)
    assert (whole.dataset.part == TEST).any() and whole.loaders["test"]
    shared = SharedData(whole.dataset)
    other = PosConfig(model, "tiny", None, {**options, "train_batch_size": 7})
    assert shared.make_dataset(other).config["train_batch_size"] == 7
    config = PosConfig(model, "tiny", None, options)
    part = prepare(config, dataset=shared.make_dataset(config))
    assert part.loaders["test"] is None and not (part.dataset.part == TEST).any()
    assert len(part.dataset.log) == (whole.dataset.part != TEST).sum()
    assert not shared.dataset.config
    for phase in ("train", "valid"):
        one, two = whole.loaders[phase]._dataset, part.loaders[phase]._dataset
        for name in ("user_id", "item_id", "timestamp"):
            assert torch.equal(one.inter_feat[name], two.inter_feat[name])
    assert part.dataset.identity == whole.dataset.identity
    assert part.dataset.item_num == whole.dataset.item_num
    assert score(part) == score(whole)


def test_empty_cells_of_events_are_cut_with_the_log(tmp_path: Path) -> None:
    """And those of items and users are not."""
    whole = shop.open_shop(shop.write(tmp_path, shop.tables()))
    config = PosConfig("AttrFormer", "shop", None, whole.config.external_config_dict)
    part = prepare(config, dataset=SharedData(whole.dataset).make_dataset(config))
    missing, kept = whole.dataset.missing, whole.dataset.part != TEST
    assert missing["stars"][~kept].any() and missing["stars"][kept].any()
    np.testing.assert_array_equal(part.dataset.missing["stars"], missing["stars"][kept])
    for field in ("price", "age"):
        np.testing.assert_array_equal(part.dataset.missing[field], missing[field])
    part.model.load_state_dict(whole.model.state_dict())
    assert score(part) == score(whole)
