"""From the options of a row to its configuration, its data, and the digest of its run."""

from __future__ import annotations

import hashlib
import inspect
import sys
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from recbole_pos.config.option import DATA
from recbole_pos.config.options import find_option
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.location import SIDE_FEATURES
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import read_dataset
from recbole_pos.position.schemes import SCHEMES, scheme_names
from recbole_pos.runs.worker import QUIET
from recbole_pos.study.expand import digest

NUMERICS = 1  # raised when the same options would give other numbers
# Options that decide where and how a run is reported, and do not change its results.
INDIFFERENT = (
    *("data_path", "gpu_id", "use_gpu", "worker", "show_progress", "tensorboard", "init_from"),
    *("logger", "log_wandb", "wandb_project", "plugins", "data_on_device", "cache"),
    "memory_limit",
)
# Options that digests of earlier versions lack, with the values that do what those versions did.
_SINCE_1 = {
    **dict.fromkeys(("update_from", "new_items", "column_types", "train_batch_events")),
    "benchmark_filename": None,
    **{"precision": "auto", "compile": False},
    **{"rm_copies": False, "request_time": "none"},
    **dict.fromkeys((*SIDE_FEATURES, "target_events")),
    **{"feature_fusion": "sum", "numeric_embedding": "periodic", "numeric_bins": 32},
    **dict.fromkeys(("item_vectors", "item_vectors_train", "item_vectors_weight")),
    **{"item_vectors_use": "add", "item_vectors_whiten": False},
    **{"target_window": 1, "lr_scheduler": "none", "warmup_steps": 0, "ema_decay": 0.0},
}
_PROCESS = uuid.uuid4().hex  # in the digest of code whose text cannot be read
_PLAIN = (bool, int, float, str, bytes, tuple, type(None))
_OF_MODEL = ("model", "init_from")  # options with the role of data that are not read with them


def row_config(
    options: Mapping[str, Any], more: Mapping[str, Any] | None = None, strict: bool = False
) -> PosConfig:
    """Return the configuration of a row.

    Args:
        options: model, dataset, config_files and options, as a plan has them; ``attach`` has the
            schemes to add to those of the row that it is attached to.
        more: options that win over ``options``.
        strict: whether an option without an effect is an error.

    Raises:
        UsageError: for an option that is wrong.
    """
    merged = {**options, **(more or {})}
    model, dataset = merged.pop("model", None), merged.pop("dataset", None)
    files = list(merged.pop("config_files", ()))
    if attach := merged.pop("attach", None):
        config = PosConfig(model, dataset, files, merged, strict=False)
        if "position" not in config.plain:
            raise UsageError(f"attach: {config['model']} takes no position schemes")
        merged["position"] = attached(config.plain["position"], attach)
    return PosConfig(model, dataset, files, {**merged, **QUIET}, strict=strict)


def attached(position: Any, schemes: list[str]) -> list[str]:
    """Return the schemes of a model, with further schemes attached.

    Args:
        position: option ``position`` of the model.
        schemes: names of the schemes to attach.
    """
    kept = [name for name in scheme_names(position) if name != "nope"]
    return [*kept, *scheme_names(list(schemes), "attach")]


def run_digest(config: PosConfig, identity: Mapping[str, Any], *others: Any) -> str:
    """Return the digest of a run, which is the name of its folder.

    Args:
        config: configuration of the run.
        identity: identity of its data and split.
        others: whether it is a trial, or the digest of the run that it is attached to.
    """
    plain = {
        key: value
        for key, value in config.plain.items()
        if key not in INDIFFERENT and not (key in _SINCE_1 and value == _SINCE_1[key])
    }
    return digest(plain, dict(identity), NUMERICS, sources(config), *others)


def sources(config: PosConfig) -> list[str]:
    """Return digests of the code of a custom model and custom schemes, so that edits make new runs.

    The whole module counts, since a class may call anything in it; for code of a notebook, the
    class and everything that it names there.
    """
    position = config.plain.get("position") or []
    names = [position] if isinstance(position, str) else position
    classes = [config.model_class, *(SCHEMES[name] for name in names if name in SCHEMES)]
    texts = []
    for cls in classes:
        if cls.__module__.partition(".")[0] in ("recbole_pos", "recbole"):
            continue
        try:
            texts.append(inspect.getsource(sys.modules[cls.__module__]))
        except (OSError, TypeError, KeyError):
            parts: dict[int, str] = {}
            _read_typed(cls, cls.__module__, parts)
            texts.append("\n".join(parts.values()))
    return [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts]


def _read_typed(member: Any, module: str, texts: dict[int, str]) -> None:
    """Collect the text of a class or function of a notebook, and of everything that it names there.

    Args:
        member: the class, function or value.
        module: module of the notebook; objects of others are left out.
        texts: id of an object -> its text, which is filled.
    """
    member = getattr(
        member, "fget", getattr(member, "__func__", member)
    )  # the function of a property or method
    if id(member) in texts or getattr(member, "__module__", module) != module:
        return
    parts: Iterable[Any] = ()
    if inspect.isfunction(member):
        with suppress(OSError):  # a plain shell keeps no text
            texts[id(member)] = inspect.getsource(member)
        parts = [
            member.__globals__[name]
            for name in member.__code__.co_names
            if name in member.__globals__
        ]
    elif inspect.isclass(member):
        texts[id(member)] = member.__qualname__
        own = {key: value for key, value in vars(member).items() if not key.startswith("__")}
        parts = (*own, *own.values(), *member.__bases__)
    elif isinstance(member, _PLAIN):
        texts[id(member)] = repr(member)
    texts.setdefault(
        id(member), f"{_PROCESS}{id(member)}"
    )  # unreadable code differs from process to process
    for part in parts:
        _read_typed(part, module, texts)


def require_twins(configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Require that all models of a table know the time of the request, or none does.

    The exception: each that knows it has a twin that differs in nothing else, since the table then
    measures the effect of that knowledge.

    Args:
        configs: complete configurations by name.

    Raises:
        UsageError: naming a model that knows the time and has no twin.
    """
    twins: dict[str, dict[str, str]] = {}
    for name, config in configs.items():
        left_out = (*INDIFFERENT, *QUIET, "seed", "request_time")
        rest = {key: value for key, value in config.items() if key not in left_out}
        twins.setdefault(digest(rest), {})[config.get("request_time", "none")] = name
    knowing = [both["target"] for both in twins.values() if set(both) == {"target"}]
    if knowing and any("none" in both for both in twins.values()):
        raise UsageError(
            f"request_time: {knowing[0]} knows the time of what it predicts and others do not, so "
            "their metrics are not comparable; compare it with one that differs in request_time "
            "only, or give all the same"
        )


def data_key(config: PosConfig) -> str:
    """Return a digest of the data options, equal for configurations that read the same data."""
    about = {
        key: value
        for key, value in config.plain.items()
        if find_option(key).role == DATA and key not in _OF_MODEL
    }
    return digest(about, str(config["MODEL_TYPE"]))


class Datasets:
    """A cache of prepared datasets, one for all configurations that read the same data."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def prepare(self, config: PosConfig) -> Any:
        """Return the dataset of a configuration, after ``build``."""
        key = data_key(config)
        if key not in self.kept:
            dataset = read_dataset(config)
            dataset.build()
            self.kept[key] = dataset
        return self.kept[key]
