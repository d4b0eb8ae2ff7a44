"""From a row's options to a configuration, the data it needs, and the name of its run."""

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
from recbole_pos.data.kinds import SIDE_FEATURES
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import read_dataset
from recbole_pos.position.schemes import SCHEMES, scheme_names
from recbole_pos.runs.worker import QUIET
from recbole_pos.study.expand import digest

NUMERICS = 1  # raised when the same options would give other numbers
# What decides where and how a run is reported, and nothing of what it finds.
INDIFFERENT = (
    *("data_path", "gpu_id", "use_gpu", "worker", "show_progress", "tensorboard", "init_from"),
    *("logger", "log_wandb", "wandb_project", "plugins", "data_on_device", "cache"),
    "memory_limit",
)
# Options that runs named before do not have, with what they did.
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
_PROCESS = uuid.uuid4().hex  # of what nothing can be read of
_PLAIN = (bool, int, float, str, bytes, tuple, type(None))
_OF_MODEL = ("model", "init_from")  # stand with the data in the table of options, but are not


def row_config(
    options: Mapping[str, Any], more: Mapping[str, Any] | None = None, strict: bool = False
) -> PosConfig:
    """Return the configuration of a row.

    Args:
        options: model, dataset, config_files and options, as a plan has them; ``attach`` has the
            schemes that are added to those of the row that it is attached to.
        more: options that win.
        strict: whether an option that changes nothing is an error.

    Raises:
        UsageError: for whatever is wrong with them.
    """
    given = {**options, **(more or {})}
    model, dataset = given.pop("model", None), given.pop("dataset", None)
    files = list(given.pop("config_files", ()))
    if attach := given.pop("attach", None):
        before = PosConfig(model, dataset, files, given, strict=False)
        if "position" not in before.plain:
            raise UsageError(f"attach: {before['model']} takes no position schemes")
        given["position"] = attached(before.plain["position"], attach)
    return PosConfig(model, dataset, files, {**given, **QUIET}, strict=strict)


def attached(position: Any, schemes: list[str]) -> list[str]:
    """Return the schemes of a model that others are added to."""
    kept = [name for name in scheme_names(position) if name != "nope"]
    return [*kept, *scheme_names(list(schemes), "attach")]


def run_digest(config: PosConfig, identity: Mapping[str, Any], *others: Any) -> str:
    """Return the name of a run.

    Args:
        config: configuration of the run.
        identity: identity of its data and split.
        others: what else decides it: whether it is tested, the run that it is attached to.
    """
    plain = {
        key: value
        for key, value in config.plain.items()
        if key not in INDIFFERENT and not (key in _SINCE_1 and value == _SINCE_1[key])
    }
    return digest(plain, dict(identity), NUMERICS, sources(config), *others)


def sources(config: PosConfig) -> list[str]:
    """Return digests of the code of a custom model and custom schemes: edited, they are others.

    The whole module counts, since a class may call anything in it; of what was typed into a
    notebook, all that the class names there.
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
            found: dict[int, str] = {}
            _read_typed(cls, cls.__module__, found)
            texts.append("\n".join(found.values()))
    return [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts]


def _read_typed(one: Any, module: str, found: dict[int, str]) -> None:
    """Collect the text of a class or function of a notebook, and of what it names there."""
    one = getattr(one, "fget", getattr(one, "__func__", one))  # of a property, of a method
    if id(one) in found or getattr(one, "__module__", module) != module:
        return
    parts: Iterable[Any] = ()
    if inspect.isfunction(one):
        with suppress(OSError):  # of a plain shell, which keeps no text
            found[id(one)] = inspect.getsource(one)
        parts = [one.__globals__[name] for name in one.__code__.co_names if name in one.__globals__]
    elif inspect.isclass(one):
        found[id(one)] = one.__qualname__
        own = {key: value for key, value in vars(one).items() if not key.startswith("__")}
        parts = (*own, *own.values(), *one.__bases__)
    elif isinstance(one, _PLAIN):
        found[id(one)] = repr(one)
    found.setdefault(id(one), f"{_PROCESS}{id(one)}")  # it is another one in each process
    for part in parts:
        _read_typed(part, module, found)


def require_twins(configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a table in which some models know the time of the request and others do not.

    Unless each that does has a twin that differs in nothing else: then that is what is compared.

    Args:
        configs: complete configurations by name.

    Raises:
        UsageError: naming one without a twin.
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
    """Equal for configurations that read the same data in the same way."""
    about = {
        key: value
        for key, value in config.plain.items()
        if find_option(key).role == DATA and key not in _OF_MODEL
    }
    return digest(about, str(config["MODEL_TYPE"]))


class Datasets:
    """Prepared data, once for all configurations that read the same."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def of(self, config: PosConfig) -> Any:
        """Return the dataset of a configuration, after ``build``."""
        key = data_key(config)
        if key not in self.kept:
            dataset = read_dataset(config)
            dataset.build()
            self.kept[key] = dataset
        return self.kept[key]
