"""The table of options: every number is bounded, and a wrong value is an error that names it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shop
from recbole.config import Config

from recbole_pos.cli.parser import parse_overrides
from recbole_pos.config.option import IGNORED, check_kind
from recbole_pos.config.options import OPTIONS, count_cores, find_option, list_by_role
from recbole_pos.config.posconfig import DERIVED_KEYS, PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import prepare
from recbole_pos.layers.attention import ACTIVATIONS
from recbole_pos.model.models import list_built_in
from recbole_pos.model.sasrec import BLOCKS
from recbole_pos.values import shown
from recbole_pos.yaml_files import ROOT, read_yaml

OF_PLUGIN = [ROOT / "overall.yaml", ROOT / "base.yaml"]
OF_PLUGIN += [file for room in ("model", "position", "loss") for file in (ROOT / room).iterdir()]


def test_every_option_is_in_the_table() -> None:
    """Every one of the plugin; every number has bounds, and no row is of an option no one has."""
    other = [PosConfig(name, "ml-100k").internal_config_dict for name in list_built_in()]
    ours = [read_yaml(file) for file in OF_PLUGIN]
    inner = {
        f"{key}.{name}": v for key, o in OPTIONS.items() for name, v in (o.inner or {}).items()
    }
    every = {key for options in other for key in options} - DERIVED_KEYS
    of_graphs = {"entity_kg_num_interval", "relation_kg_num_interval"}
    assert {key for options in ours for key in options} <= OPTIONS.keys()
    named = {"model", "dataset", "plugins", *inner, *(key for options in ours for key in options)}
    assert OPTIONS.keys() - every - named <= of_graphs
    examples: dict[str, list[Any]] = {}
    for options in (*other, *ours, inner):
        for key in options.keys() - DERIVED_KEYS - list_by_role(IGNORED):
            if (row := find_option(key)).inner is None and row.check is None and key != "threshold":
                example = options[key] if row.example is None else row.example
                examples.setdefault(key, []).append(example)
    for key, found in examples.items():
        typed = any(example not in (None, []) for example in found)
        assert typed or find_option(key).example or key.startswith("eval_args."), (
            f"{key}: what type?"
        )
        if any(type(leaf) in (int, float) for leaf in leaves(found)):
            assert find_option(key).high is not None, f"{key} has no bounds"


def leaves(example: Any) -> list[Any]:
    """What stands in lists and mappings."""
    if isinstance(example, dict):
        example = list(example.values())
    return sum(map(leaves, example), []) if isinstance(example, (list, tuple)) else [example]


def test_what_the_table_rules_out_is_refused() -> None:
    """By its own row alone, whatever reads the option."""
    for name, row in OPTIONS.items():
        wrong = ["no such name"] if row.choices else []
        wrong += [row.low - 1] if row.low is not None else []
        wrong += [row.high * 2 + 1] if row.high is not None and math.isfinite(row.high) else []
        for value in wrong:
            with pytest.raises(UsageError, match=f"here: {name}"):
                check_kind(f"here: {name}", row, value, value)


@pytest.mark.parametrize(
    ("model", "options", "named"),
    [
        # kinds of values
        ("FPARec", {"learning_rate": "0.1"}, "a number"),
        ("FPARec", {"epochs": 1.5}, "a whole number"),
        ("SASRec", {"clip_grad_norm": {"max_norm": math.nan}}, "found nan"),
        ("FPARec", {"adam_betas": [0.9]}, "two numbers"),
        ("BPR", {"wandb_project": "a\0b"}, "zero byte"),
        ("PosSASRec", {"position": []}, "[nope]"),
        # bounds and choices
        ("FPARec", {"learning_rate": 0.0}, "above 0"),
        ("NextItNet", {"dilations": [1, 10**9]}, "1 to 1,000"),
        ("SASRec", {"seq_len": {"a": -3}}, "seq_len.a"),
        (
            "FPARec",
            {"worker": 2 * count_cores() + 1},
            f"0 to {2 * count_cores()} (here, twice the cores)",
        ),
        ("BPR", {"eval_args": {"cold_items": True}}, "keep, drop"),
        # names
        ("FPARec", {"learing_rate": 0.1}, "nearest known: learning_rate"),
        ("FPARec", {"lr": 0.1}, "; here it is learning_rate"),
        ("FPARec", {"Max-Seq-Len": 9}, "; here it is MAX_ITEM_LIST_LENGTH"),
        ("FPARec", {"device": "cuda"}, "; here it is use_gpu and gpu_id"),
        ("FPARec", {"embedding_size": 8}, "; here it is hidden_size"),
        ("GRU4Rec", {"dropout": 0.1}, "; here it is dropout_prob"),
        (
            "LightGCN",
            {},
            "; to try it, give -m LightGCN --plugins=recbole.model.general_recommender",
        ),
        ("DeepFM", {}, "context-aware"),
        ("PosSASRec", {"lambda_2": 1.0}, "PosRec"),
        ("PosSASRec", {"positional_rank": 4}, "position: fparec"),
        ("FPARek", {}, "did you mean FPARec"),
        ("PosSASRec", {"position": ["lerned"]}, "did you mean learned"),
        # metrics
        ("FPARec", {"metrics": []}, "at least one"),
        ("FPARec", {"metrics": ["NDGC"]}, "nearest known: ndcg"),
        ("FPARec", {"metrics": ["AUC"]}, "labels"),
        ("FPARec", {"valid_metric": "NDCG@7"}, "Hit@5"),
        # several together
        ("FPARec", {"loss_type": "BPR"}, "CE"),
        ("BPR", {"train_neg_sample_args": None}, "needs them"),
        ("PosSASRec", {"loss_type": "SCE", "train_neg_sample_args": {"sample_num": 2}}, "itself"),
        ("SASRec", {"train_neg_sample_args": {"sample_num": 2}}, "sample items set loss_type: BPR"),
        ("FPARec", {"train_neg_sample_args": {"sample_num": 2}}, "set loss_type: sampled_softmax"),
        ("FPARec", {"train_only": ["learned"]}, "init_from"),
        ("FPARec", {"checkpoint_dir": "x"}, "--run_dir"),
        ("SASRec", {"hidden_size": 10, "n_heads": 4}, "multiple of n_heads"),
        ("FEARec", {"n_layers": 1}, "at least 2"),
        ("FEARec", {"topk_factor": 1000}, "topk_factor"),
        # forms of their own
        ("SASRec", {"discretization": {"a": {"method": "ED"}}}, "bucket"),
        ("SASRec", {"user_inter_num_interval": "text"}, "an interval"),
        ("SASRec", {"load_col": {"inter": "*", "item": "price"}}, "item: expected a list"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_what_is_wrong_is_named(model: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError) as refused:
        PosConfig(model, "ml-100k", None, options)
    message = str(refused.value)
    assert named in message and "\n" not in message
    assert any(key in message for key in [*options, model])


def test_values_at_the_edge_are_allowed() -> None:
    given = {
        "clip_grad_norm": {"max_norm": 1.0, "norm_type": math.inf},
        "worker": 2 * count_cores(),
    }
    config = PosConfig("FPARec", "ml-100k", None, given)
    assert all(config[key] == value for key, value in given.items())


def test_messages_are_short_whatever_the_value() -> None:
    """Long, wide, deep, of parts that stand in each other, of itself, or numpy's."""
    endless: list[Any] = []
    endless.append(endless)
    deep: Any = 1
    shared: Any = ["x" * 50]
    for _ in range(900):
        deep = {"a": deep}
    for _ in range(60):
        shared = [shared] * 9
    huge = [shared, deep, "y" * 10**6, list(range(10**6)), {str(n): n for n in range(10**5)}]
    assert all(len(shown(value)) <= 250 for value in (*huge, 10**9999))
    plain = [np.str_("a"), [np.str_("a")], {"b": np.float64(1.5)}, (1,)]
    assert [shown(value) for value in plain] == ["'a'", "['a']", "{'b': 1.5}", "(1,)"]
    values = ["z" * 4000, ["z" * 50] * 2000, {"z" * 4000: ["z" * 4000] * 9}, endless]
    for number, option in enumerate(OPTIONS):
        name, _, part = option.partition(".")
        value = values[number % len(values)]
        try:
            PosConfig("AttrFormer", "ml-100k", None, {name: {part: value} if part else value})
        except UsageError as error:
            assert len(str(error)) < 2500 and "z" * 300 not in str(error)


FIELDS = {
    **{"load_col": shop.LOAD, "topk": [3], "valid_metric": "NDCG@3", "show_progress": False},
    "filter_inter_by_user_or_item": False,
}


@pytest.mark.parametrize(
    ("fields", "numerical", "named"),
    [
        ([], [], "at least one field"),
        (["brnd"], [], "did you mean brand"),
        (["country"], [], "'country'"),
        (["item_id"], [], "'item_id'"),
        (["brand", "price"], [], "add numerical_features: [price]"),
        (["vector"], [], "'vector'"),  # of which FDSA would read the mean only
        (["vector"], ["vector"], "'vector'"),
        (["brand", "tags", "price"], ["price"], ""),
    ],
)
def test_features_are_fields_of_items(
    fields: list[str], numerical: list[str], named: str, tmp_path: Path
) -> None:
    tables = shop.tables()
    tables["item"]["vector:float_seq"] = "0.5 1.5"
    given = {**FIELDS, "load_col": {**shop.LOAD, "item": [*shop.LOAD["item"], "vector"]}}
    given |= {"selected_features": fields, "numerical_features": numerical}
    given["data_path"] = str(shop.write(tmp_path, tables))
    for model in ("SASRecF", "GRU4RecF", "FDSA"):
        if named:
            with pytest.raises(UsageError, match="(selected|numerical)_features: ") as refused:
                prepare(PosConfig(model, "shop", None, given))
            assert named in str(refused.value)
        else:
            made = prepare(PosConfig(model, "shop", None, given))
            rows = next(iter(made.loaders["test"]))[0]
            assert made.model.full_sort_predict(rows).isfinite().all()


@pytest.mark.parametrize(
    ("table", "model", "given"),
    [
        ("user", "AttrFormer", {"relations": ["age"]}),
        ("inter", "AttrFormer", {"relations": ["channel"]}),
        ("item", "PosSASRec", {"position": ["difsr"], "difsr_fields": ["brand"]}),
        ("item", "SASRecF", {"selected_features": ["tags"]}),
    ],
    ids=str,
)
def test_a_field_without_a_value_is_refused(
    table: str, model: str, given: dict[str, Any], tmp_path: Path
) -> None:
    tables = shop.tables()
    for column in tables[table].columns[1 if table != "inter" else 3 :]:
        tables[table][column] = ""
    options = {**FIELDS, **given, "data_path": str(shop.write(tmp_path, tables))}
    with pytest.raises(UsageError, match=f"shop.{table}"):
        prepare(PosConfig(model, "shop", None, options))


def test_values_of_the_command_line_are_yaml() -> None:
    for text, value in (
        *(("1e-3", 0.001), ("5E4", 50000.0), ("3", 3), ("true", True), ("~", None)),
        *(("[a, 1]", ["a", 1]), ("{LS: test_only}", {"LS": "test_only"})),
        *((text, text) for text in ("1+1", "a: b: c", "2020-13-45", "9" * 5000, "x]", "@home")),
        *((text, text) for text in ("*.csv", "C:\\data", "a [b", "`x`", "[5,inf)")),
        ("__import__('os').getpid()", "__import__('os').getpid()"),  # RecBole's Config evaluates
    ):
        found = parse_overrides([f"--a.b={text}"])["a"]["b"]
        assert found == value and type(found) is type(value)
    for text in ("[rope", "[a] b", "{a: 1, a: 2}", '"rope', "[" * 1000):
        with pytest.raises(UsageError, match="^--position: .* but is wrong") as refused:
            parse_overrides([f"--position={text}"])
        assert len(str(refused.value)) < 500
    for twice in (["--a=1", "--a=2"], ["--a=1", "--a.b=2"], ["--a.b=1", "--a.b=2"]):
        with pytest.raises(UsageError, match="given twice"):
            parse_overrides(twice)


def test_names_of_choices_are_those_of_the_code() -> None:
    assert find_option("hidden_act").choices == tuple(ACTIVATIONS)
    assert find_option("block").choices == tuple(BLOCKS)


def test_recboles_own_config_checks_options_of_the_plugin() -> None:
    """``run_recbole(model="FPARec")``: constructors trust what they are given."""
    for wrong in ({"positional_rank": 0}, {"eval_args": {"target": "some"}}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            Config("FPARec", "ml-100k", config_dict=wrong)
