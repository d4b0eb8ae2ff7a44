"""Every fix that RecBole 1.2.x needs, most of them for today's numpy.

Each function is one fix; its docstring says what breaks without it. The import hook at the end of
this file applies it when its module of RecBole is imported, or at once if that was imported before.
Nothing here imports RecBole.
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
from typing import Any

Patch = Callable[..., None]
PATCHES: dict[str, list[Patch]] = defaultdict(list)  # name of a module -> what changes it

# Names that numpy 1.24 or 2.0 lacks and RecBole 1.2 uses -> their names today.
_NUMPY_ALIASES = {
    **{"float": "float64", "float_": "float64", "int": "int64", "object": "object_"},
    **{"complex": "complex128", "complex_": "complex128", "bool": "bool_", "long": "int64"},
    **dict.fromkeys(("str", "unicode_", "unicode"), "str_"),
}


def patches(module_name: str) -> Callable[[Patch], Patch]:
    """Register a function that changes a module of RecBole once it is imported."""

    def register(patch: Patch) -> Patch:
        PATCHES[module_name].append(patch)
        return patch

    return register


def wraps(module_name: str, path: str) -> Callable[[Callable], Callable]:
    """Register ``around``: RecBole's function is then called as ``around(function, *args)``.

    Args:
        module_name: the module that defines the function.
        path: ``function`` or ``Class.method``. A function is replaced in every module of RecBole
            that has imported it.
    """
    class_name, _, name = path.rpartition(".")

    def register(around: Callable) -> Callable:
        @patches(module_name)
        def replace(module: ModuleType) -> None:
            owner = getattr(module, class_name) if class_name else module
            function = getattr(owner, name)

            @functools.wraps(function)
            def wrapper(*args: Any, **named: Any) -> Any:
                return around(function, *args, **named)

            setattr(owner, name, wrapper)
            for loaded_name, loaded in list(sys.modules.items()):
                if loaded_name.startswith("recbole.") and vars(loaded).get(name) is function:
                    setattr(loaded, name, wrapper)

        return around

    return register


@patches("recbole")
def prepare_recbole(module: ModuleType | None = None) -> None:
    """Restore names that RecBole uses and numpy 2 and scipy 1.13 lack: AttributeError.

    LightGCN, NGCF and others call dok_matrix._update. Also silence pandas 2, which warns for each
    column that RecBole reads.
    """
    import numpy as np
    import scipy.sparse

    for name, target in _NUMPY_ALIASES.items():
        if name not in np.__dict__:
            setattr(np, name, getattr(np, target))
    if not hasattr(scipy.sparse.dok_matrix, "_update"):
        scipy.sparse.dok_matrix._update = lambda self, data: self._dict.update(data)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"recbole\.")


@wraps("recbole.data.dataset.dataset", "Dataset._fill_nan")
def fill_missing_cells(original: Callable[..., None], self: Any) -> None:
    """Fill missing cells: with pandas 3 Dataset._fill_nan fills a copy of each column.

    Missing numbers become the mean, tokens 0 (padding), sequences empty arrays.
    """
    import numpy as np

    for feat in (getattr(self, name) for name in self.feat_name_list):
        for field in feat:
            column, kind = feat[field], self.field2type[field].value
            if not column.hasnans:
                continue
            if kind.endswith("seq"):  # users or items without a row in their file
                empty = np.array([], dtype=np.int64 if kind == "token_seq" else np.float64)
                feat[field] = column.map(
                    lambda cell, e=empty: e if isinstance(cell, float) else cell
                )
            else:
                feat[field] = column.fillna(0 if kind == "token" else column.mean())


@wraps("recbole.evaluator.collector", "Collector.get_data_struct")
def keep_plain_values(get_data_struct: Callable[..., Any], self: Any) -> Any:
    """Let RecBole 1.2.1's collector have numbers: it calls .cpu() on all that it has collected."""
    values = self.data_struct._data_dict
    plain = {key: values.pop(key) for key in [*values] if not hasattr(values[key], "cpu")}
    struct = get_data_struct(self)
    struct._data_dict.update(plain)
    values.update(plain)
    return struct


@wraps("recbole.model.general_recommender.pop", "Pop.__init__")
def note_label_field(init: Callable[..., None], self: Any, config: Any, dataset: Any) -> None:
    """Keep the name of the label field for :func:`count_every_interaction`."""
    init(self, config, dataset)
    self.LABEL = config["LABEL_FIELD"]


@wraps("recbole.model.general_recommender.pop", "Pop.calculate_loss")
def count_every_interaction(original: Callable[..., Any], self: Any, interaction: Any) -> Any:
    """Count every interaction: RecBole's Pop counts an item once a batch, and negatives, too.

    With the usual batches all popular items get the same count: the list is close to random.
    """
    import torch

    items = interaction[self.ITEM_ID]
    labels = interaction[self.LABEL] if self.LABEL in interaction else torch.ones_like(items)
    self.item_cnt.index_add_(0, items, labels.to(self.item_cnt.dtype)[:, None])
    self.max_cnt = self.item_cnt.amax(0)
    return torch.nn.Parameter(torch.zeros(1)).to(self.device)


@wraps("recbole.model.layers", "ContextSeqEmbAbstractLayer.embed_float_fields")
def embed_several_numbers(embed: Callable[..., Any], self: Any, values: Any, *args: Any) -> Any:
    """Join several numerical_features of items at the right axis: RuntimeError."""
    if values is not None:  # [..., 1, 2 * num_fields] -> [..., num_fields, 2]
        values = values.reshape(*values.shape[:-2], -1, 2)
    return embed(self, values, *args)


@patches("recbole.quick_start.quick_start")
def report_metrics_together(quick_start: ModuleType) -> None:
    """Report to Ray in one mapping: objective_function reports by keywords, TypeError."""
    tune = quick_start.tune
    vars(quick_start)["tune"] = SimpleNamespace(report=lambda **metrics: tune.report(metrics))


# --- when a module of RecBole is imported ---

# RecBole imports these wherever it trains, which costs a second at every start; only three metrics
# of ratings and RecBole's own trainer call them. Here the first call imports them.
LATER = {
    "recbole.evaluator.metrics": "sklearn.metrics",
    "recbole.utils.utils": "torch.utils.tensorboard",
}
# Importing it switches autograd's anomaly detection on for the whole process, and every model of
# RecBole imports it: all then train 20-25% slower.
_SINE = "recbole.model.sequential_recommender.sine"


class _Hook(MetaPathFinder):
    """Finds the modules to patch where Python finds them, and patches them once they have run."""

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
    """Run a module of RecBole, and patch it."""
    name, torch = module.__name__, sys.modules.get("torch")
    if name in LATER:
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": _import_later(LATER[name])}
    was_on = torch is not None and torch.is_anomaly_enabled()
    execute(module)
    if name == _SINE:
        sys.modules["torch"].autograd.set_detect_anomaly(was_on)
    for patch in PATCHES[name]:
        patch(module)


def _import_later(deferred: str) -> Callable[..., Any]:
    """Return an ``__import__`` that imports the ``deferred`` module when a name of it is called."""

    def import_(name: str, *args: Any) -> Any:
        if name != deferred:
            return builtins.__import__(name, *args)
        module = ModuleType(name)
        vars(module)["__getattr__"] = lambda called: (
            lambda *args, **named: getattr(import_module(name), called)(*args, **named)
        )
        return module

    return import_


def install() -> None:
    """Patch what is imported of RecBole, and whatever will be. Called once, by the package."""
    for name in PATCHES.keys() & sys.modules.keys():
        for patch in PATCHES[name]:
            patch(sys.modules[name])
    if _SINE in sys.modules:
        sys.modules["torch"].autograd.set_detect_anomaly(False)
    sys.meta_path.insert(0, _Hook())
