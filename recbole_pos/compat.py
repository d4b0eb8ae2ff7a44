"""Every fix that RecBole 1.2.x needs, most of them for today's numpy; no other file patches it.

Each function is one fix and says what breaks without it. It is applied as its module of RecBole is
imported, by the one hook at the end of this file, or at once if that was imported before; nothing
here imports RecBole.
"""

from __future__ import annotations

import builtins
import functools
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

Patch = TypeVar("Patch", bound=Callable[..., None])
# by name of the module that they change
PATCHES: dict[str, list[Callable[..., None]]] = defaultdict(list)

# Names that numpy 1.24 or 2.0 lacks and RecBole 1.2 uses, and what they stand for.
_NUMPY_ALIASES = {
    **{"float": "float64", "float_": "float64", "int": "int64", "object": "object_"},
    **{"complex": "complex128", "complex_": "complex128", "bool": "bool_", "long": "int64"},
    **dict.fromkeys(("str", "unicode_", "unicode"), "str_"),
}


def patches(name: str) -> Callable[[Patch], Patch]:
    """Register a function that changes a module of RecBole once it is imported."""

    def register(patch: Patch) -> Patch:
        PATCHES[name].append(patch)
        return patch

    return register


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Call ``around(function, *args)`` in place of a function of a class or module.

    One of a module is replaced in every module of RecBole that has it by this name.
    """
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapper(*args: Any, **named: Any) -> Any:
        return around(function, *args, **named)

    setattr(owner, name, wrapper)
    for module in [m for n, m in sys.modules.items() if n.startswith("recbole.")]:
        if vars(module).get(name) is function:
            setattr(module, name, wrapper)


@patches("recbole")
def prepare_recbole(module: ModuleType | None = None) -> None:
    """What RecBole uses of others and is gone: AttributeError with numpy 2 and scipy 1.13.

    LightGCN, NGCF and others call dok_matrix._update. With pandas 2 reading warns for each column.
    """
    import numpy as np
    import scipy.sparse

    for name, target in _NUMPY_ALIASES.items():
        if name not in np.__dict__:
            setattr(np, name, getattr(np, target))
    if not hasattr(scipy.sparse.dok_matrix, "_update"):
        scipy.sparse.dok_matrix._update = lambda self, data: self._dict.update(data)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"recbole\.")


@patches("recbole.data.dataset.dataset")
def fill_missing_cells(dataset: ModuleType) -> None:
    """Dataset._fill_nan fills a copy of each column with pandas 3: missing cells stay NaN.

    Missing numbers become the mean, tokens 0 (padding), sequences empty arrays.
    """
    import numpy as np
    import pandas as pd

    def fill(self: Any) -> None:
        for name in self.feat_name_list:
            feat = getattr(self, name)
            for field in feat:
                column, kind = feat[field], self.field2type[field].value
                is_missing = column.isna()
                if not is_missing.any():
                    continue
                if kind.endswith("seq"):  # of users or items without a row in their file
                    empty = np.array([], dtype=np.int64 if kind == "token_seq" else np.float64)
                    pairs = zip(column, is_missing, strict=True)
                    cells = [empty if missing else cell for cell, missing in pairs]
                    feat[field] = pd.Series(cells, index=feat.index, dtype=object)
                else:
                    feat[field] = column.fillna(0 if kind == "token" else column.mean())

    dataset.Dataset._fill_nan = fill


@patches("recbole.evaluator.collector")
def keep_plain_values(collector: ModuleType) -> None:
    """RecBole 1.2.1's collector calls .cpu() on all it has collected, numbers and counts, too."""

    def around(collected: Callable[..., Any], self: Any) -> Any:
        values = self.data_struct._data_dict
        plain = {key: values.pop(key) for key in [*values] if not hasattr(values[key], "cpu")}
        struct = collected(self)
        struct._data_dict.update(plain)
        values.update(plain)
        return struct

    wrap(collector.Collector, "get_data_struct", around)


@patches("recbole.config.configurator")
def skip_numpy_settings_of_config(configurator: ModuleType) -> None:
    """Config.compatibility_settings assigns from np.float_ and others, gone in numpy 2."""
    configurator.Config.compatibility_settings = lambda self: prepare_recbole()


@patches("recbole.model.general_recommender.pop")
def count_every_event_in_pop(pop: ModuleType) -> None:
    """RecBole's Pop counts an item once a batch, and sampled negatives like events.

    With the usual batches all popular items are then level, and the list is close to random.
    """
    import torch

    def calculate_loss(self: Any, interaction: Any) -> torch.Tensor:
        item = interaction[self.ITEM_ID]
        happened = interaction[self.LABEL] if self.LABEL in interaction else torch.ones_like(item)
        self.item_cnt.index_add_(0, item, happened.to(self.item_cnt.dtype)[:, None])
        self.max_cnt = self.item_cnt.amax(0)
        return torch.nn.Parameter(torch.zeros(1)).to(self.device)

    def around(build: Callable[..., None], self: Any, config: Any, dataset: Any) -> None:
        build(self, config, dataset)
        self.LABEL = config["LABEL_FIELD"]

    wrap(pop.Pop, "__init__", around)
    pop.Pop.calculate_loss = calculate_loss


@patches("recbole.model.layers")
def embed_several_numbers(layers: ModuleType) -> None:
    """RecBole joins several numerical_features of items at the wrong axis: RuntimeError."""

    def around(embed: Callable[..., Any], self: Any, fields: Any, *args: Any, **named: Any) -> Any:
        if fields is not None:  # [..., 1, 2 fields] to [..., fields, 2]
            fields = fields.reshape(*fields.shape[:-2], -1, 2)
        return embed(self, fields, *args, **named)

    wrap(layers.ContextSeqEmbAbstractLayer, "embed_float_fields", around)


@patches("recbole.quick_start.quick_start")
def report_metrics_together(quick_start: ModuleType) -> None:
    """objective_function reports to Ray by keywords; Ray takes one mapping: TypeError."""
    tune = quick_start.tune
    vars(quick_start)["tune"] = SimpleNamespace(report=lambda **metrics: tune.report(metrics))


# --- when a module of RecBole is imported ---

# RecBole imports these wherever it trains, a second of every start. Three metrics of ratings call
# the one, its own trainer the other; here they are imported then.
LATER = {
    "recbole.evaluator.metrics": "sklearn.metrics",
    "recbole.utils.utils": "torch.utils.tensorboard",
}
# Importing it switches autograd's anomaly detection on for the whole process, and every model of
# RecBole imports it: all then train 20-25% slower.
_SINE = "recbole.model.sequential_recommender.sine"


class _Later:
    """Stands for a module, in another alone, until something of it is called."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, called: str) -> Callable[..., Any]:
        return lambda *args, **named: getattr(import_module(self.name), called)(*args, **named)


class _Hook(MetaPathFinder):
    """Finds the modules that are patched where they are found without it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_patched = name in PATCHES or name in LATER or name == _SINE
        spec = PathFinder.find_spec(name, path) if is_patched else None
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = functools.partial(_execute, loader.exec_module)
        return spec


def _execute(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    name, torch = module.__name__, sys.modules.get("torch")
    if later := LATER.get(name):

        def import_(wanted: str, *args: Any) -> Any:
            return _Later(later) if wanted == later else builtins.__import__(wanted, *args)

        vars(module)["__builtins__"] = {**vars(builtins), "__import__": import_}
    was_on = torch is not None and torch.is_anomaly_enabled()
    execute(module)
    if name == _SINE:
        sys.modules["torch"].autograd.set_detect_anomaly(was_on)
    for patch in PATCHES[name]:
        patch(module)


def install() -> None:
    """Patch what is imported of RecBole, and whatever will be. Called once, by the package."""
    for name in PATCHES.keys() & sys.modules.keys():
        for patch in PATCHES[name]:
            patch(sys.modules[name])
    if _SINE in sys.modules:
        sys.modules["torch"].autograd.set_detect_anomaly(False)
    sys.meta_path.insert(0, _Hook())
