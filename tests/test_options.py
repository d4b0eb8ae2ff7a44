"""The table of options: every number is bounded, and a wrong value is an error that names it."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shop
import yaml
from recbole.config import Config
from recbole.utils import ModelType

from recbole_pos.config.arguments import parse_overrides
from recbole_pos.config.checks import check_value
from recbole_pos.config.options import OPTIONS, REFUSED, Option, find_option
from recbole_pos.config.posconfig import DERIVED_KEYS, PosConfig
from recbole_pos.errors import UnknownKey, UsageError
from recbole_pos.experiment.build import prepare
from recbole_pos.layers.forward import ACTIVATIONS
from recbole_pos.layers.gated_blocks import BLOCKS
from recbole_pos.model.models import MODELS, RECBOLE, list_kinds
from recbole_pos.yaml_files import ROOT, list_property_files, read_properties, read_yaml

FOLDERS = ("model", "position", "loss")
SHIPPED = [read_properties(folder, x) for folder in FOLDERS for x in list_property_files(folder)]
# read elsewhere: sizes of sessions, fractions, bytes, limits of labels
UNBOUNDED = {"session_filter", "train_fraction", "memory_limit", "gpu_id"}


def test_every_option_is_in_the_table() -> None:
    """Of the plugin and of RecBole's models; its row allows every default, and bounds numbers."""
    models = [*MODELS.shipped, *RECBOLE]
    defaults = [PosConfig(name, "ml-100k").internal_config_dict for name in models]
    defaults += [read_yaml(ROOT / "base.yaml"), *(file.defaults for file in SHIPPED)]
    names = {key for options in defaults for key in options} - DERIVED_KEYS
    assert names <= OPTIONS.keys()
    inner = {key for key in OPTIONS if "." in key}
    of_graphs = {"entity_kg_num_interval", "relation_kg_num_interval"}
    assert OPTIONS.keys() - names - inner <= {"model", "dataset", "plugins", "encoding"} | of_graphs
    for options in defaults:
        for key in options.keys() - DERIVED_KEYS - REFUSED:
            check_value("default", find_option(key), options[key])
    for name, row in OPTIONS.items():
        is_number = "int" in row.type.split() or "float" in row.type.split()
        is_bounded = row.range or row.refused or name in UNBOUNDED
        assert is_bounded or not is_number, f"{name} has no bounds"
    rows = [*read_yaml(ROOT / "options.yaml"), *(name for file in SHIPPED for name in file.rows)]
    assert sorted(rows) == sorted(OPTIONS)  # an option has one row


@pytest.mark.parametrize("name", [name for name, row in OPTIONS.items() if row.range])
def test_numbers_outside_of_their_bounds_are_refused(name: str) -> None:
    row = OPTIONS[name]
    for bound, step in zip(row.range, (-1, 1), strict=True):
        is_open = isinstance(bound, str)  # above 0
        number = float(bound.split()[-1]) if is_open else bound
        for value, is_allowed in ((number, not is_open), (number + step, False)):
            given = [value] * (row.length or 1) if row.type.startswith("list of") else value
            given = {"a": value} if row.type.startswith("mapping") else given
            if is_allowed and math.isfinite(value):
                check_value("here", row, given)
            elif math.isfinite(value):
                with pytest.raises(UsageError, match=f"here: {name}: .*{re.escape(row.allowed)}"):
                    check_value("here", row, given)


@pytest.mark.parametrize(
    ("type_name", "allowed", "refused"),
    [
        ("int", [3, np.int64(3)], [True, 3.5, "3", None, [3]]),
        ("float or none", [0.5, 3, None], ["0.5", True, math.nan, math.inf]),
        ("bool", [True], [1, "True"]),
        ("str or list of str", ["a", ["a"], ("a",)], ["", [1], {"a": 1}, None]),
        ("mapping of int", [{"a": 1}], [{"a": "1"}, {1: 1}, [1]]),
        ("interval", ["[3,inf)", "(0, 1.5];[2,3]"], ["3", "[3]", "text"]),
    ],
)
def test_types(type_name: str, allowed: list[Any], refused: list[Any]) -> None:
    row = Option("x", type_name)
    for value in allowed:
        check_value("here", row, value)
    for value in refused:
        with pytest.raises(UsageError, match="here: x: expected"):
            check_value("here", row, value)


@pytest.mark.parametrize(
    ("model", "options", "named"),
    [
        # kinds of values
        ("FPARec", {"epochs": 1.5}, "expected int"),
        # bounds and choices
        ("FPARec", {"learning_rate": 0.0}, "above 0"),
        ("BPR", {"eval_args": {"cold_items": True}}, "keep, drop"),
        # names
        ("FPARec", {"learing_rate": 0.1}, "did you mean learning_rate"),
        ("FPARec", {"lr": 0.1}, "; here it is learning_rate"),
        ("LightGCN", {}, "Another of RecBole's"),
        ("PosSASRec", {"lambda_2": 1.0}, "PosRec"),
        # metrics
        ("FPARec", {"metrics": ["NDGC"]}, "did you mean ndcg"),
        # several together
        ("BPR", {"train_neg_sample_args": None}, "needs them"),
        ("SASRec", {"train_neg_sample_args": {"sample_num": 2}}, "should be None"),
        ("SASRec", {"hidden_size": 10, "n_heads": 4}, "multiple of n_heads"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_what_is_wrong_is_named(model: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError) as refused:
        PosConfig(model, "ml-100k", None, options)
    message = str(refused.value)
    assert named in message and "\n" not in message
    assert any(key in message for key in [*options, model])


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        ("SASRec", {"LABEL_FIELD": "rating"}, "only by custom models"),
        ("SessionKNN", {"train_batch_size": 64}, "only by models trained by gradients"),
        ("TORoPE", {"time_base": 100.0, "time_min_period": 3.0}, "only without time_base"),
        ("BPR", {"train_neg_sample_args": {"alpha": 0.5}}, "distribution: popularity"),
        ("PosSASRec", {"train_only": ["rope"]}, "only with init_from"),
    ],
    ids=str,
)
def test_unread_options(model: str, options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """In what is given to one run, and not in what serves several models or is a run's own file."""
    key = list(options)[-1]
    with pytest.raises(
        UnknownKey, match=f"^configuration: {key}.* is not read by {model}"
    ) as found:
        PosConfig(model, "ml-100k", None, options)
    assert reason in str(found.value) and found.value.key == key
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump(options))
    with pytest.raises(UnknownKey, match=f"a.yaml: {key}.* put it under `for`"):
        PosConfig(model, "ml-100k", [str(file)])
    file.write_text(yaml.safe_dump({"for": {model: options}}))
    kept = PosConfig(model, "ml-100k", [str(file)])
    assert PosConfig(model, "ml-100k", None, options, strict=False).plain == kept.plain
    file.write_text(yaml.safe_dump(kept.plain))
    again = PosConfig(None, None, [str(file)])
    assert again.plain == kept.plain and not again.strict


def test_what_is_read_under_one_of_several_conditions_is_allowed() -> None:
    for model, options in (
        ("KernelAttention", {"kernel_l": "full", "kernel_band": 5}),
        ("SASRec", {"log_wandb": False, "logger": ["wandb"], "wandb_project": "mine"}),
        ("TORoPE", {"time_min_period": 3.0}),
    ):
        PosConfig(model, "ml-100k", None, options)


def test_conditions_name_options_and_kinds_of_models() -> None:
    kinds = {"custom models", *list_kinds("TORoPE", ModelType.SEQUENTIAL, ["to_rope"])}
    for row in OPTIONS.values():
        for condition in [row.only] if isinstance(row.only, str) else row.only:
            for alternative in condition.split(" or "):
                if alternative.startswith("by "):
                    assert alternative[3:] in kinds
                else:
                    key, _, values = alternative.removeprefix("not ").partition(": ")
                    choices = OPTIONS[key].choices
                    assert not choices or set(values.split()) <= set(choices), row.name


def test_features_are_fields_of_items(tmp_path: Path) -> None:
    """That they train says test_recbole_view.py."""
    data = {"load_col": shop.LOAD, "topk": [3], "valid_metric": "NDCG@3"}
    data["data_path"] = str(shop.write(tmp_path, shop.tables()))
    for field, named in (("brnd", "did you mean brand"), ("price", "numerical_features")):
        config = PosConfig("FDSA", "shop", None, {**data, "selected_features": [field]})
        with pytest.raises(UsageError, match=f"selected_features: .*{named}"):
            prepare(config)


def test_values_of_the_command_line_are_yaml() -> None:
    """What is no yaml is text, and no code, which RecBole's Config would evaluate."""
    values = {"1e-3": 0.001, "3": 3, "true": True, "~": None, "[a, 1]": ["a", 1]}
    texts = ("1+1", "a: b: c", "2020-13-45", "*.csv", "C:\\data", "[5,inf)", "__import__('os')")
    for text, value in {**values, **{text: text for text in texts}}.items():
        found = parse_overrides([f"--a.b={text}"])["a"]["b"]
        assert found == value and type(found) is type(value)
    assert parse_overrides(["--a.b=1", "--a.c=2", "--a.b=3"]) == {"a": {"b": 3, "c": 2}}


def test_names_of_choices_are_those_of_the_code() -> None:
    assert find_option("hidden_act").choices == tuple(ACTIVATIONS)
    assert find_option("block").choices == tuple(BLOCKS)


def test_recboles_own_config_checks_options_of_the_plugin() -> None:
    """``run_recbole(model="FPARec")``: constructors trust what they are given."""
    with pytest.raises(UsageError, match="positional_rank"):
        Config("FPARec", "ml-100k", config_dict={"positional_rank": 0})
