"""Configuration: known keys, types, yaml scalars, and that every key of a yaml is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import recbole
import yaml

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import prepare
from recbole_pos.model.models import BASELINES, MODELS
from recbole_pos.position.schemes import SCHEMES
from recbole_pos.values import suggest
from recbole_pos.yaml_files import (
    DATASETS,
    ROOT,
    PackagedLoader,
    YamlLoader,
    overall_defaults,
    parse_scalar,
    read_yaml,
)


def make(model: str = "FPARec", files: list[str] | None = None, **options) -> PosConfig:
    return PosConfig(model, "ml-100k", files, options)


def test_unknown_key_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="'learing_rate'; nearest known: learning_rate"):
        make(learing_rate=0.1)


def test_unknown_key_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("hiden_size: 8\n")
    with pytest.raises(UsageError, match="hidden_size"):
        make(files=[str(file)])


def test_unknown_key_in_the_dataset_yaml(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "tiny.yaml").write_text("lod_col: {inter: [a]}\n")
    with pytest.raises(UsageError, match="tiny.yaml: unknown key 'lod_col'; nearest .*load_col"):
        PosConfig("FPARec", "tiny", None, {"data_path": str(tmp_path)})


def test_unknown_nested_key() -> None:
    with pytest.raises(UsageError, match="'splt' in eval_args; nearest known: split"):
        make(eval_args={"splt": {"LS": "valid_only"}})


def test_a_key_of_another_scheme_is_unknown_unless_the_scheme_is_used() -> None:
    with pytest.raises(UsageError, match="positional_rank"):
        make("PosSASRec", positional_rank=4)
    assert make("PosSASRec", position=["fparec"], positional_rank=4)["positional_rank"] == 4


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("learning_rate", "fast", "a number"),
        ("learning_rate", "0.1", "a number"),
        ("epochs", 1.5, "a whole number"),
        ("epochs", True, "a whole number"),
        ("use_gpu", 1, "true or false"),
        ("eval_args", "LS", "a mapping"),
        ("metrics", {"a": 1}, "a list"),
        ("wandb_project", 3, "text"),
        ("epochs", None, "a whole number"),
    ],
)
def test_wrong_types(key: str, value: object, wanted: str) -> None:
    with pytest.raises(UsageError, match=f"{key}: expected {wanted}"):
        make(**{key: value})


def test_values_are_never_evaluated(tmp_path: Path) -> None:
    """RecBole's Config runs eval on strings from the command line and from dicts."""
    marker = tmp_path / "ran"
    code = f"__import__('pathlib').Path({str(marker)!r}).touch()"
    config = make(LIST_SUFFIX=code)
    assert config["LIST_SUFFIX"] == code and not marker.exists()
    assert parse_scalar(code, "--x") == code and not marker.exists()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("5E4", 50000.0),
        ("3", 3),
        ("true", True),
        ("~", None),
        ("[a, 1]", ["a", 1]),
        ("{LS: test_only}", {"LS": "test_only"}),
        ("1+1", "1+1"),
        ("a: b: c", "a: b: c"),
        ("2020-13-45", "2020-13-45"),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_scalars_are_yaml(text: str, value: object) -> None:
    found = parse_scalar(text, "--x")
    assert found == value and type(found) is type(value)


def test_python_tags_in_yaml_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("epochs: !!python/object/apply:os.getpid []\n")
    with pytest.raises(UsageError, match="not valid yaml"):
        make(files=[str(file)])


@pytest.mark.parametrize("text", ["- a", "a: ["])
def test_files_that_are_no_mapping(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match="a.yaml"):
        make(files=[str(file)])
    with pytest.raises(UsageError, match="cannot read"):
        make(files=[str(tmp_path / "none.yaml")])


def test_unknown_model_and_scheme() -> None:
    with pytest.raises(UsageError, match="did you mean FPARec"):
        make("FPARek")
    with pytest.raises(UsageError, match="unknown scheme 'lerned' .did you mean learned"):
        make("PosSASRec", position=["lerned"])


def test_what_recbole_refuses_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="unknown 'Luck'; known are .*ndcg"):
        make(metrics=["Luck"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("save_dataset", True), ("checkpoint_dir", "x")),
        *(("transform", "mask_itemseq"), ("state", "DEBUG"), ("loss_decimal_place", 9)),
    ],
)
def test_keys_without_effect_are_refused(key: str, value: object) -> None:
    with pytest.raises(UsageError, match=key):
        make(**{key: value})


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("FPARec", {"MAX_ITEM_LIST_LENGTH": 0}, "at least 1"),
        ("SASRec", {"MAX_ITEM_LIST_LENGTH": -3}, "at least 1"),
        ("FPARec", {"hidden_dropout_prob": 1.0}, r"in \[0, 1\)"),
        ("SASRec", {"attn_dropout_prob": -0.1}, r"in \[0, 1\)"),
        ("FPARec", {"topk": []}, "topk"),
        ("FPARec", {"topk": [10.5]}, "topk"),
        ("FPARec", {"topk": [10, "abc"]}, "topk"),
        ("FPARec", {"topk": 0}, "topk"),
        ("FPARec", {"n_heads": 0}, "n_heads must be at least 1"),
        ("FPARec", {"n_layers": 0}, "n_layers"),
        ("FPARec", {"positional_rank": 0}, "positional_rank"),
        ("FPARec", {"seed": -1}, "seed must be at least 0"),
        ("FPARec", {"learning_rate": 0.0}, "above 0"),
        ("FPARec", {"epochs": 0}, "epochs must be at least 1"),
        ("FPARec", {"adam_betas": [2, 0.9]}, "adam_betas"),
        ("FPARec", {"clip_grad_norm": 5}, "clip_grad_norm: expected a mapping"),
        ("FPARec", {"clip_grad_norm": {"maxnorm": 1}}, "nearest known: max_norm"),
        ("FPARec", {"window_stride": 1.5}, "a whole number"),
        ("SASRec", {"train_windows": "sliding"}, "train_windows is only read under augmentation"),
        ("FPARec", {"length_pool": 1, "augmentation": "none"}, "length_pool is only read under"),
        ("FPARec", {"learner": "adm"}, "did you mean adam"),
        ("FPARec", {"metric_decimal_place": 0}, "metric_decimal_place"),
        ("FPARec", {"metrics": []}, "metrics"),
        ("FPARec", {"metrics": ["NDGC"]}, "nearest known: ndcg"),
        ("FPARec", {"valid_metric": "NDCG@7"}, "not computed; metrics and topk give Hit@5"),
        ("FPARec", {"metrics": ["GAUC"], "valid_metric": "GAUC@5"}, "metrics and topk give GAUC"),
        ("FPARec", {"metrics": ["AUC"]}, "metrics: AUC needs labels, and here items are ranked"),
        ("FPARec", {"mask_history": "maybe"}, "true or false"),
        ("FPARec", {"eval_args": {"mode": "uni100"}}, "only full"),
        ("BPR", {"eval_args": {"mode": {"valid": "full", "test": "uni10"}}}, "only full"),
        ("FPARec", {"eval_args": {"target": "lst"}}, "target: 'lst' is not .*did you mean last"),
        ("FPARec", {"eval_args": {"target": 3}}, "target: 3 is not one of all, last, first, rand"),
        ("BPR", {"eval_args": {"cold_items": True}}, "cold_items: True is not one of keep, drop"),
        ("BPR", {"train_neg_sample_args": None}, "needs them"),
        ("GRU4Rec", {"loss_type": "foo"}, "loss_type: 'foo' is not one of CE, BPR"),
        ("FPARec", {"loss_type": "BPR"}, "loss_type: 'BPR' is not one of CE"),
        ("FPARec", {"MODEL_TYPE": "general"}, "unknown key 'MODEL_TYPE'"),
        ("FPARec", {"reg_weight": 3}, "unknown key 'reg_weight'"),
        ("SASRec", {"train_windows": "foo"}, "train_windows: 'foo'"),
        ("PosSASRec", {"position": ["learned", "learned"]}, "given twice"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_values_out_of_range(model: str, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(model, **options)


def test_the_file_that_is_wrong_is_the_one_blamed(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("epochs: 1\nhidden_size: x\n")
    with pytest.raises(UsageError, match="a.yaml: hidden_size"):
        make(files=[str(tmp_path / "a.yaml")])
    with pytest.raises(UsageError, match="configuration: epochs"):
        make(files=[str(tmp_path / "a.yaml")], epochs="abc", hidden_size=8)


def test_a_yaml_key_given_twice(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("epochs: 1\nepochs: 2\n")
    with pytest.raises(UsageError, match="'epochs' is given twice"):
        make(files=[str(tmp_path / "a.yaml")])
    for damage in (b"\xff\xfe\x00", b"epochs: " + b"[" * 100_000):
        (tmp_path / "a.yaml").write_bytes(damage)
        with pytest.raises(UsageError, match="a.yaml is not valid yaml"):
            make(files=[str(tmp_path / "a.yaml")])


def test_both_loaders_read_the_same() -> None:
    """All files that the package and RecBole bring, by their loader and by that of others."""
    recboles = Path(recbole.__file__).parent / "properties"
    files = [file for folder in (ROOT, DATASETS, recboles) for file in folder.rglob("*.yaml")]
    assert len(files) > 150
    for text in (file.read_text("utf-8") for file in files):
        assert repr(yaml.load(text, PackagedLoader)) == repr(yaml.load(text, YamlLoader))


def test_eval_args_are_merged_not_replaced() -> None:
    args = make(eval_args={"split": {"LS": "test_only"}})["eval_args"]
    assert args["split"] == {"LS": "test_only"} and args["order"] == "TO"


def test_cross_entropy_needs_no_option() -> None:
    """RecBole refuses SASRec with its own defaults; the plugin leaves the negatives out."""
    assert make("SASRec")["train_neg_sample_args"]["distribution"] == "none"
    assert make("BPR")["train_neg_sample_args"]["distribution"] == "uniform"


def test_plain_configuration_repeats_itself(tmp_path: Path) -> None:
    first = make(learning_rate=0.5, position=["parec"])
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(first.plain))
    again = PosConfig(None, None, [str(file)])
    assert again.plain == first.plain
    assert again.final_config_dict == first.final_config_dict


def test_numpy_values_are_written_as_plain_ones() -> None:
    plain = make(learning_rate=np.float64(0.5)).plain
    assert yaml.safe_load(yaml.safe_dump(plain))["learning_rate"] == 0.5


def test_a_copy_in_data_path_wins_over_the_wheel(tmp_path: Path) -> None:
    assert make()["data_path"].endswith("dataset_example/ml-100k")
    (tmp_path / "ml-100k").mkdir()
    (tmp_path / "ml-100k" / "ml-100k.inter").write_text("")
    assert make(data_path=str(tmp_path))["data_path"] == str(tmp_path / "ml-100k")


class _Recording(PosConfig):
    """Notes every key that is read."""

    read: set[str]

    def __getitem__(self, key: str):
        self.__dict__.setdefault("read", set()).add(key)
        return super().__getitem__(key)

    def __getattr__(self, key: str):
        if "final_config_dict" in self.__dict__ and key in self.final_config_dict:
            self.__dict__.setdefault("read", set()).add(key)
        return super().__getattr__(key)


@pytest.mark.parametrize("model", [*MODELS, *BASELINES])
def test_every_key_of_the_plugins_yaml_is_read(tiny: Path, model: str) -> None:
    """No option that nothing reads: model, scheme and overall yaml against a training run."""
    config = _Recording(
        model, "tiny", None, {"data_path": str(tiny), "epochs": 1, "show_progress": False}
    )
    config.__dict__["read"] = set()
    experiment = prepare(config)
    experiment.trainer.fit(
        experiment.loaders["train"], experiment.loaders["valid"], saved=False, verbose=False
    )
    experiment.trainer._tensorboard()
    keys = set(read_yaml(ROOT / "model" / f"{model}.yaml"))
    if model in MODELS:
        keys |= set(overall_defaults())
    for name in config["position"] or ():
        keys |= set(read_yaml(ROOT / "position" / f"{name}.yaml"))
    read_by_recbole_config = {"metrics", "tensorboard"}
    read_sometimes = {"new_items", "column_types"}  # with update_from; of parquet
    assert keys - config.read - read_by_recbole_config - read_sometimes == set()


def test_every_scheme_and_model_has_its_yaml_and_no_other() -> None:
    assert {p.stem for p in (ROOT / "position").iterdir()} == set(SCHEMES)
    assert {p.stem for p in (ROOT / "model").iterdir()} == {*MODELS, *BASELINES}


def test_eval_args_are_merged_from_every_source(tmp_path: Path) -> None:
    """A key given later leaves the others as they are, instead of falling back to a default."""
    for name, text in (("a", "{split: {GT: [0.9, 0.95]}}"), ("b", "{cold_items: drop}")):
        (tmp_path / f"{name}.yaml").write_text(f"eval_args: {text}\n")
    files = [str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")]
    config = PosConfig("FPARec", "ml-100k", files, {"eval_args": {"target": "last"}})
    got = {key: config["eval_args"][key] for key in ("split", "cold_items", "target")}
    assert got == {"split": {"GT": [0.9, 0.95]}, "cold_items": "drop", "target": "last"}


def test_suggestions_ignore_case() -> None:
    assert "NDCG" in suggest("ndgc", ["NDCG", "Hit"])
    assert suggest("zzzz", ["NDCG"]) == ""


def test_dataset_yaml_is_merged_below_what_the_user_gives(tmp_path: Path) -> None:
    """A partial eval_args keeps the other keys; schemes named there bring their options."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "tiny.yaml").write_text(
        "eval_args: {split: {RS: [8, 1, 1]}}\nposition: [parec]\nepochs: 3\n"
    )
    config = PosConfig("PosSASRec", "tiny", None, {"data_path": str(tmp_path), "epochs": 5})
    assert config["eval_args"]["split"] == {"RS": [8, 1, 1]}
    assert config["eval_args"]["order"] == "TO"
    assert config["positional_mask"] == "before_softmax" and config["epochs"] == 5
    given = {"data_path": str(tmp_path), "eval_args": {"split": {"LS": "test_only"}}}
    config = PosConfig("PosSASRec", "tiny", None, given)
    assert config["eval_args"]["split"] == {"LS": "test_only"}


@pytest.mark.parametrize(
    "columns",
    [
        {"load_col": {"inter": ["user_id", "item_id", "timestamp"], "item": None}},
        {"load_col": {"inter": ["user_id", "item_id", "timestamp"], "item": "price"}},
        {"unused_col": {"item": "price"}},
        {"unload_col": {"item": "*"}, "load_col": {"inter": "*"}},
    ],
    ids=str,
)
def test_columns_are_lists(columns: dict) -> None:
    """RecBole reads the letters of a text as names."""
    key = next(iter(columns))
    with pytest.raises(UsageError, match=f"{key}: item: expected a list of fields.*found"):
        PosConfig("FPARec", "toyshop", None, columns)
