"""No option is silent: set to another value, it changes what comes out, or is refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shop
import yaml
from recbole.utils import ModelType

from recbole_pos.config.option import DATA, IGNORED
from recbole_pos.config.options import find_option, list_by_role
from recbole_pos.config.posconfig import DERIVED_KEYS, PosConfig
from recbole_pos.data import cache
from recbole_pos.data.loaders import TargetLoader
from recbole_pos.errors import Interrupted, StorageError, UnknownKey, UsageError
from recbole_pos.experiment.build import prepare, read_dataset
from recbole_pos.experiment.evaluation import collect_test_ranks
from recbole_pos.experiment.run import NeedsDataset

# Change where and how fast a run computes, how long it may, what it shows, or where it begins.
ELSEWHERE = {
    *("gpu_id", "use_gpu", "worker", "data_on_device", "cache", "compile"),
    *("precision", "enable_amp", "enable_scaler", "eval_batch_size", "reproducibility"),
    *("show_progress", "tensorboard", "logger", "log_wandb", "data_path", "plugins"),
    *("model", "dataset"),
    *("seed", "init_from", "train_only", "update_from", "new_items", "metric_decimal_place"),
    # how files are written and fields are called: another value does not fit the files at hand
    *("encoding", "field_separator", "seq_separator", "column_types", "load_col"),
    *("USER_ID_FIELD", "ITEM_ID_FIELD", "TIME_FIELD"),
}
# Values that must matter on the shop, where none follows from the default.
VALUES: dict[str, Any] = {
    **{"epochs": 2, "eval_step": 2, "stopping_step": 0, "timestamp_unit": "days"},
    **{"train_batch_size": 16, "train_batch_events": 40, "length_pool": 1, "window_stride": 2},
    **{"threshold": {"stars": 3}, "val_interval": {"stars": "[3,inf)"}, "seq_len": {"tags": 1}},
    **{"alias_of_user_id": ["country"], "alias_of_item_id": ["brand"]},
    **{"normalize_field": ["price"], "normalize_all": True, "numerical_features": ["weight"]},
    **{"discretization": {"price": {"method": "ED", "bucket": 3}}, "selected_features": ["brand"]},
    **{"unload_col": {"user": ["age"]}, "unused_col": {"inter": ["channel"]}},
    **{"filter_inter_by_user_or_item": True, "rm_dup_inter": "last", "train_fraction": "1/2"},
    **{"user_inter_num_interval": "[4,inf)", "item_inter_num_interval": "[17,inf)"},
    **{"session_filter": {"item": 17}, "clip_grad_norm": {"max_norm": 0.01}},
    **{"train_neg_sample_args": {"sample_num": 3}, "train_neg_sample_args.alpha": 0.5},
    **{"train_neg_sample_args.distribution": "popularity", "eval_args.target": "first"},
    **{"eval_args.cold_items": "drop", "eval_args.ties": "random(3)", "valid_metric": "Hit@3"},
    **{"metrics": ["NDCG", "Hit"], "topk": [3, 7], "k": 2, "n_heads": 2, "top_k": 1},
    **{"learner": "sgd", "learning_rate": 0.01, "lr_decay_step": 1, "dilations": [1, 2]},
    **{"position": ["nope"], "relations": ["brand"], "block": "ligr", "layer_norm_eps": 0.1},
    **{"bank_size": 3, "cross_sequence": "none", "train_windows": "last"},
}
MODELS = ["PosSASRec", "BPR", "SASRecF", "ItemKNN", "SPop"]
READERS = MODELS[:2]  # by their two datasets, sequential and general, all models read their data
MODELS += [pytest.param(name, marks=pytest.mark.long) for name in ("AttrFormer", "TORoPE")]


@pytest.fixture(scope="module")
def shops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tables = shop.tables(users=40)
    folder = shop.write(tmp_path_factory.mktemp("shops"), tables)
    (folder / "shop" / "shop.ent").write_text("ent_id:token\tsize:float\nA\t1\nB\t2\n")
    return folder


def make_base(model: str, shops: Path) -> dict[str, Any]:
    """Small, with fields of all types, and several targets a user; as far as the model reads it."""
    base = {
        **dict.fromkeys(("hidden_size", "inner_size", "embedding_size"), 8),
        **{"n_layers": 2, "n_heads": 1, "MAX_ITEM_LIST_LENGTH": 5, "epochs": 3, "topk": [3, 5]},
        **{"valid_metric": "NDCG@3", "show_progress": False, "learning_rate": 0.05},
        **{"train_batch_size": 64, "eval_batch_size": 256, "load_col": shop.LOAD, "cache": False},
        **{"selected_features": ["brand", "tags", "price"], "numerical_features": ["price"]},
        **{"relations": ["brand", {"field": "price"}, "country"], "relation_size": 4},
        **{"filter_inter_by_user_or_item": False, "data_path": str(shops)},
        "eval_args": {"split": {"RS": [6, 2, 2]}},
    }
    return shop.drop_unread(model, base)


def outcome(model: str, given: dict[str, Any], dataset: Any = None) -> str:
    """Everything that a short run finds, as text: columns of its data, losses, metrics.

    Args:
        dataset: the data under other options of the model, or None to read them.
    """
    config = PosConfig(model, "shop", None, given)
    made = prepare(config, dataset=dataset and dataset.for_config(config))
    trainer, loaders = made.trainer, made.loaders
    trainer.fit(loaders["train"], loaders["valid"], saved=False, verbose=False)
    story = [(line["loss"], line["valid"]) for line in trainer.progress.history]
    test = loaders["test"]
    assert isinstance(test, TargetLoader)
    rows = next(iter(test))[0]
    columns = sorted(rows.interaction)
    if sampler := getattr(loaders["train"], "neg_prefix", ""):
        columns.append(sampler)
    found = trainer.evaluate(test, load_best_model=False)
    ages = collect_test_ranks(trainer.eval_collector, test._dataset)["age"].tolist()
    best = trainer.progress.best_epoch, trainer.progress.best_score, trainer.progress.stopped
    about = [story, {**found}, ages, columns, made.dataset.identity, best]
    return json.dumps(about, default=lambda x: x.tolist() if isinstance(x, np.generic) else str(x))


def another(key: str, default: Any, config: PosConfig) -> Any:
    """A value that is not the default; None where the default says nothing of others."""
    if key in VALUES:
        return VALUES[key]
    if choices := [choice for choice in find_option(key).choices if choice != default]:
        return [choices[0]] if isinstance(default, list) else choices[0]
    if isinstance(default, bool):
        return not default
    if key == "mask_history":  # empty stands for what is usual
        return config["MODEL_TYPE"] == ModelType.SEQUENTIAL
    if key == "relation_heads":
        return 4
    if isinstance(default, int):
        return default * 2 or 1
    if isinstance(default, float):
        return default / 2 or 0.3
    if isinstance(default, list) and all(isinstance(number, float) for number in default):
        return [0.7 * number for number in default]
    return f"{default}x" if isinstance(default, str) and key.isupper() else find_option(key).example


def options_of(config: PosConfig) -> dict[str, Any]:
    """Option -> its value, of a run; of those within mappings by a dot."""
    found = {**config.internal_config_dict, **config.external_config_dict}
    for key in ("eval_args", "train_neg_sample_args"):
        found |= {f"{key}.{name}": value for name, value in (found[key] or {}).items()}
    names = {"eval_args", "clip_grad_norm.norm_type", *DERIVED_KEYS, *ELSEWHERE}
    names |= {f"eval_args.{name}" for name in ("split", "order", "group_by", "mode")}
    return {k: v for k, v in found.items() if k not in names and find_option(k).role != IGNORED}


@pytest.mark.parametrize("model", MODELS)
def test_an_option_changes_something_or_is_refused(model: str, shops: Path) -> None:
    """Every option of the table that a model has, set alone; those of reading data by READERS."""
    base = make_base(model, shops)
    config = PosConfig(model, "shop", None, base)
    dataset = read_dataset(config)
    dataset.build()
    usual = outcome(model, base, dataset)
    silent, refused, of_data = [], 0, {*cache.READ, *list_by_role(DATA)}
    for key, default in options_of(config).items():
        value = another(key, default, config)
        if value is None or value == default:
            continue
        if (model, key) == ("BPR", "stopping_step"):  # it is better after each epoch here
            continue
        name, _, part = key.partition(".")
        if name in cache.READ and model not in READERS:
            continue
        given = {**base, name: {**(base.get(name) or {}), part: value} if part else value}
        try:
            if outcome(model, given, None if name in of_data else dataset) == usual:
                silent.append(f"{key}={value}")
        except UsageError as error:
            assert name in str(error)
            refused += 1
    assert silent == [] and refused


@pytest.mark.parametrize(
    ("model", "options", "named"),
    [
        ("SASRec", {"threshold": {"rating": 4}}, "val_interval"),
        ("SASRec", {"load_col": {"inter": "*", "kg": ["head_id"]}}, "kg"),
        ("SASRec", {"numerical_features": ["rating"]}, "selected_features"),
        ("SASRec", {"normalize_field": ["timestamp"]}, "ids and times"),
        ("PosSASRec", {"learner": "sgd", "adam_betas": [0.8, 0.9]}, "learner: adam"),
        ("PosSASRec", {"lr_scheduler": "step"}, "lr_decay_step"),
        ("PosSASRec", {"lr_scheduler": "cosine", "lr_decay_rate": 0.5}, "under lr_scheduler: none"),
        ("PosSASRec", {"feature_fusion": "concat_mlp"}, "with item_features or user_features or"),
        ("PosSASRec", {"eval_args": {"target": "last"}}, "LS"),
        ("TORoPE", {"time_base": 100.0, "time_min_period": 3.0}, "without time_base"),
        ("BPR", {"train_neg_sample_args": {"alpha": 0.5}}, "distribution: popularity"),
        ("SessionKNN", {"train_batch_size": 64}, "counts"),
    ],
    ids=str,
)
def test_what_changes_nothing_names_what_does(
    model: str, options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    """And a run that has it already can be repeated from its file, but for what is changed."""
    with pytest.raises(UnknownKey) as refused:
        PosConfig(model, "ml-100k", None, options)
    assert named in str(refused.value) and refused.value.key in str(refused.value)
    kept = PosConfig(model, "ml-100k", None, options, strict=False)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(kept.plain))
    again = PosConfig(None, None, [str(file)])
    assert again.plain == kept.plain and not again.strict
    with pytest.raises(UnknownKey):
        PosConfig(None, None, [str(file)], options)


def test_errors_come_back_from_a_pool_of_processes() -> None:
    """Which pickles them: one that cannot be read again breaks the pool."""
    missing = NeedsDataset("k", {"dataset": "shop", "data_path": "dataset/shop"})
    interrupted = Interrupted("a run", ["my_models"])
    for error in (UnknownKey("no key a", "a"), missing, StorageError("a file"), interrupted):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_what_is_read_under_one_of_several_conditions_is_allowed() -> None:
    for model, options in (
        ("KernelAttention", {"kernel_l": "full", "kernel_band": 5}),
        ("SASRec", {"log_wandb": False, "logger": ["mlflow", "wandb"], "wandb_project": "mine"}),
        ("SASRec", {"inner_size": 128}),  # which has no block
        ("TORoPE", {"time_min_period": 3.0}),
    ):
        PosConfig(model, "ml-100k", None, options)
