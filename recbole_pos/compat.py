"""Every fix that RecBole 1.2.x needs, most of them for today's numpy.

Each function is one fix; its docstring says what breaks without it. The import hook at the end of
this file applies it when its module of RecBole is imported, or at once if that was imported before.
Nothing here imports RecBole.
"""

from __future__ import annotations

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
PATCHES: dict[str, list[Patch]] = defaultdict(list)  # name of a module -> its patches

# Names that numpy 1.24 or 2.0 lacks and RecBole 1.2 uses -> their names today.
_NUMPY_ALIASES = {
    **{"float": "float64", "float_": "float64", "int": "int64", "object": "object_"},
    **{"complex": "complex128", "complex_": "complex128", "bool": "bool_", "long": "int64"},
    **dict.fromkeys(("str", "unicode_", "unicode"), "str_"),
}


def patch_module(module_name: str) -> Callable[[Patch], Patch]:
    """Decorate a function that changes a module of RecBole, once that is imported."""

    def register(patch: Patch) -> Patch:
        PATCHES[module_name].append(patch)
        return patch

    return register


def wrap_function(module_name: str, path: str) -> Callable[[Callable], Callable]:
    """Decorate a function that replaces one of RecBole's: ``around(original, *args, **kwargs)``.

    ``path`` is ``function`` or ``Class.method`` in the module that defines it. A function is
    replaced in every module of RecBole that has imported it.
    """
    class_name, _, name = path.rpartition(".")

    def register(around: Callable) -> Callable:
        @patch_module(module_name)
        def replace(module: ModuleType) -> None:
            owner = getattr(module, class_name) if class_name else module
            original = getattr(owner, name)

            @functools.wraps(original)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                return around(original, *args, **kwargs)

            setattr(owner, name, wrapper)
            for loaded_name, loaded in list(sys.modules.items()):
                if loaded_name.startswith("recbole.") and vars(loaded).get(name) is original:
                    setattr(loaded, name, wrapper)

        return around

    return register


@patch_module("recbole")
def prepare_recbole(module: ModuleType | None = None) -> None:
    """Restore names of numpy and scipy; RecBole raises AttributeError without them.

    numpy 2 lacks the aliases above, and scipy 1.13 dok_matrix._update, which LightGCN, NGCF and
    others call. Also silence pandas 2, which warns for each column that RecBole reads.
    """
    import numpy as np
    import scipy.sparse

    for name, target in _NUMPY_ALIASES.items():
        if name not in np.__dict__:
            setattr(np, name, getattr(np, target))
    if not hasattr(scipy.sparse.dok_matrix, "_update"):
        scipy.sparse.dok_matrix._update = lambda self, data: self._dict.update(data)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"recbole\.")


@wrap_function("recbole.data.dataset.dataset", "Dataset._fill_nan")
def fill_missing_cells(original: Callable[..., None], self: Any) -> None:
    """Fill missing cells in place; with pandas 3, RecBole fills a copy of each column.

    Missing numbers become the mean, tokens 0 (padding), sequences empty arrays.
    """
    import numpy as np

    for name in self.feat_name_list:
        feat = getattr(self, name)
        for field in feat:
            column = feat[field]
            kind = self.field2type[field].value
            if not column.hasnans:
                continue
            if kind.endswith("seq"):  # users or items without a row in their file
                empty = np.array([], dtype=np.int64 if kind == "token_seq" else np.float64)
                feat[field] = column.map(
                    lambda cell, e=empty: e if isinstance(cell, float) else cell
                )
            else:
                feat[field] = column.fillna(0 if kind == "token" else column.mean())


@wrap_function("recbole.evaluator.collector", "Collector.get_data_struct")
def keep_plain_values(get_data_struct: Callable[..., Any], self: Any) -> Any:
    """Return what was collected, with plain numbers; RecBole 1.2.1 calls ``.cpu()`` on them."""
    collected = self.data_struct._data_dict
    plain = {key: value for key, value in collected.items() if not hasattr(value, "cpu")}
    for key in plain:
        del collected[key]
    struct = get_data_struct(self)
    struct._data_dict.update(plain)
    collected.update(plain)
    return struct


@wrap_function("recbole.model.general_recommender.pop", "Pop.__init__")
def note_label_field(init: Callable[..., None], self: Any, config: Any, dataset: Any) -> None:
    """Keep the name of the label field for :func:`count_every_interaction`."""
    init(self, config, dataset)
    self.LABEL = config["LABEL_FIELD"]


@wrap_function("recbole.model.general_recommender.pop", "Pop.calculate_loss")
def count_every_interaction(original: Callable[..., Any], self: Any, interaction: Any) -> Any:
    """Count every interaction, and return a loss of 0.

    RecBole's Pop counts an item once a batch, and negatives, too: with batches of the usual size
    all popular items get the same count, and rankings are close to random.
    """
    import torch

    items = interaction[self.ITEM_ID]
    labels = interaction[self.LABEL] if self.LABEL in interaction else torch.ones_like(items)
    self.item_cnt.index_add_(0, items, labels.to(self.item_cnt.dtype)[:, None])
    self.max_cnt = self.item_cnt.amax(0)
    return torch.nn.Parameter(torch.zeros(1)).to(self.device)


@wrap_function("recbole.model.layers", "ContextSeqEmbAbstractLayer.embed_float_fields")
def embed_several_numbers(embed: Callable[..., Any], self: Any, values: Any, *args: Any) -> Any:
    """Embed several numerical_features of items; RecBole joins them on a wrong axis and fails."""
    if values is not None:  # [..., 1, 2 * num_fields] -> [..., num_fields, 2]
        values = values.reshape(*values.shape[:-2], -1, 2)
    return embed(self, values, *args)


@patch_module("recbole.quick_start.quick_start")
def report_metrics_together(quick_start: ModuleType) -> None:
    """Report metrics to Ray in one mapping; RecBole passes keywords, a TypeError in today's Ray."""
    tune = quick_start.tune
    vars(quick_start)["tune"] = SimpleNamespace(report=lambda **metrics: tune.report(metrics))


# --- when a module of RecBole is imported ---

# RecBole imports these wherever it trains, which costs 1.2 s of CPU and 70 MB in each process; only
# three metrics of ratings and RecBole's own trainer call them. Here the first call imports them.
_DEFERRED = {
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
        """Return where a module to patch is, with a loader that patches it; None for others."""
        is_patched = name in PATCHES or name in _DEFERRED or name == _SINE
        spec = PathFinder.find_spec(name, path) if is_patched else None
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = functools.partial(_execute_and_patch, loader.exec_module)
        return spec


def _execute_and_patch(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Run a module of RecBole, and patch it."""
    name = module.__name__
    torch = sys.modules.get("torch")
    was_on = torch is not None and torch.is_anomaly_enabled()
    deferred = _DEFERRED.get(name)
    if deferred is None or deferred in sys.modules:
        execute(module)
    else:
        sys.modules[deferred] = _make_stand_in(deferred)
        try:
            execute(module)
        finally:
            del sys.modules[deferred]
    if name == _SINE:
        sys.modules["torch"].autograd.set_detect_anomaly(was_on)
    for patch in PATCHES[name]:
        patch(module)


def _make_stand_in(name: str) -> ModuleType:
    """Return a module each function of which imports the module of this name when it is called."""

    def import_and_call(function_name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(name), function_name)(*args, **kwargs)

    module = ModuleType(name)
    # called for every name that is imported from the module (PEP 562)
    vars(module)["__getattr__"] = functools.partial(functools.partial, import_and_call)
    return module


def install() -> None:
    """Patch the modules of RecBole that are imported, and others when they are imported."""
    for name in PATCHES.keys() & sys.modules.keys():
        for patch in PATCHES[name]:
            patch(sys.modules[name])
    if _SINE in sys.modules:
        sys.modules["torch"].autograd.set_detect_anomaly(False)
    sys.meta_path.insert(0, _Hook())
