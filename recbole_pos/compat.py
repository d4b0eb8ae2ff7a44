"""Every fix that RecBole 1.2.x needs, most of them for today's numpy; no other file patches it.

Each function is one fix and says what breaks without it. All are safe to apply twice, and are
applied when RecBole is imported, before or after this package: nothing here imports it before.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

Action = Callable[[ModuleType], Callable[[], None] | None]

# Names that numpy 1.24 and 2.0 removed and RecBole 1.2 still uses, and what they stand for.
_NUMPY_ALIASES = {
    "float": "float64",
    "float_": "float64",
    "int": "int64",
    "complex": "complex128",
    "complex_": "complex128",
    "object": "object_",
    "str": "str_",
    "unicode_": "str_",
    "unicode": "str_",
}


def apply() -> None:
    """Apply all fixes. Called once when ``recbole_pos`` is imported."""
    when_imported("recbole", after(add_numpy_aliases))
    when_imported("recbole", after(add_dok_matrix_update))
    when_imported("recbole", after(silence_pandas_warnings))
    when_imported("recbole.data.dataset.dataset", after(fill_missing_cells))
    when_imported("recbole.evaluator.collector", after(keep_plain_values))
    when_imported("recbole.evaluator.metrics", import_when_called("sklearn.metrics"))
    when_imported("recbole.utils.utils", import_when_called("torch.utils.tensorboard"))
    when_imported("recbole.config.configurator", after(skip_numpy_settings_of_config))
    when_imported("recbole.model.sequential_recommender.sine", keep_anomaly_mode_as_it_is)
    when_imported("recbole.model.general_recommender.pop", after(count_every_event_in_pop))
    when_imported("recbole.model.layers", after(embed_several_numbers))
    when_imported("recbole.quick_start.quick_start", after(report_metrics_together))


def add_numpy_aliases(module: ModuleType | None = None) -> None:
    """RecBole reads np.float, np.float_ and others: AttributeError with numpy 2."""
    import numpy as np

    for name, target in _NUMPY_ALIASES.items():
        if name not in np.__dict__:
            setattr(np, name, getattr(np, target))


def add_dok_matrix_update(module: ModuleType | None = None) -> None:
    """LightGCN, NGCF and others call dok_matrix._update, gone since scipy 1.13: AttributeError."""
    import scipy.sparse

    if not hasattr(scipy.sparse.dok_matrix, "_update"):
        scipy.sparse.dok_matrix._update = lambda self, data: self._dict.update(data)


def silence_pandas_warnings(module: ModuleType | None = None) -> None:
    """RecBole reads with what pandas 2 calls deprecated, a warning for each column."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"recbole\.")


def fill_missing_cells(dataset: ModuleType) -> None:
    """Dataset._fill_nan fills a copy of each column with pandas 3: missing cells stay NaN."""
    import numpy as np
    import pandas as pd

    def fill(self: Any) -> None:
        for name in self.feat_name_list:
            feat = getattr(self, name)
            for field in feat:
                column, kind = feat[field], self.field2type[field].value
                if not kind.endswith("seq"):
                    if column.hasnans:
                        feat[field] = column.fillna(0 if kind == "token" else column.mean())
                elif column.isna().any():  # lists, of users or items without a line in their file
                    empty = np.array([], dtype=np.int64 if kind == "token_seq" else np.float64)
                    cells = [empty if isinstance(cell, float) else cell for cell in column]
                    feat[field] = pd.Series(cells, index=feat.index, dtype=object)

    dataset.Dataset._fill_nan = fill


def keep_plain_values(collector: ModuleType) -> None:
    """RecBole 1.2.1's collector calls .cpu() on all it has collected, numbers and counts, too."""
    Collector = collector.Collector
    if hasattr(Collector, "_keeps_plain_values"):
        return
    collected = Collector.get_data_struct

    def get_data_struct(self: Any) -> Any:
        values = self.data_struct._data_dict
        plain = {key: value for key, value in values.items() if not hasattr(value, "cpu")}
        for key in plain:
            del values[key]
        found = collected(self)
        found._data_dict.update(plain)
        values.update(plain)
        return found

    Collector.get_data_struct, Collector._keeps_plain_values = get_data_struct, True


def import_when_called(name: str) -> Action:
    """RecBole imports scikit-learn and tensorboard wherever it trains: a second of every start.

    Three metrics of ratings call the one, its own trainer the other. While a module of RecBole
    runs, ``name`` is a stand-in; what is taken from it imports the real one when it is called.
    """

    def stand_in(module: ModuleType) -> Callable[[], None] | None:
        if name in sys.modules:
            return None
        import torch  # noqa: F401  (looks through all modules while it is imported)

        def named(called: str) -> Callable[..., Any]:
            if called.startswith("__"):  # what others ask of every module
                raise AttributeError(called)
            return functools.partial(_call, name, called)

        there = ModuleType(name)
        vars(there)["__getattr__"] = named
        sys.modules[name] = there

        def take_away() -> None:
            if sys.modules.get(name) is there:
                del sys.modules[name]

        return take_away

    return stand_in


def _call(name: str, called: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(import_module(name), called)(*args, **kwargs)


def skip_numpy_settings_of_config(configurator: ModuleType) -> None:
    """Config.compatibility_settings assigns from np.float_ and others, gone in numpy 2."""
    configurator.Config.compatibility_settings = lambda self: add_numpy_aliases()


def keep_anomaly_mode_as_it_is(sine: ModuleType) -> Callable[[], None]:
    """RecBole's SINE switches autograd anomaly detection on for the whole process when imported.

    Every model imported with it, which is every model of RecBole, then trains 20-25% slower.
    """
    import torch

    was_on = torch.is_anomaly_enabled()
    if hasattr(sine, "SINE"):  # imported before this package: what was on before is not known
        was_on = False

    def set_back() -> None:
        torch.autograd.set_detect_anomaly(was_on)

    return set_back


def count_every_event_in_pop(pop: ModuleType) -> None:
    """RecBole's Pop counts an item once a batch, and sampled negatives like events.

    With the usual batches all popular items are then level, and the list is close to random.
    """
    import torch

    Pop = pop.Pop
    if hasattr(Pop, "_counts_events"):
        return
    build = Pop.__init__

    def init(self: Any, config: Any, dataset: Any) -> None:
        build(self, config, dataset)
        self.LABEL = config["LABEL_FIELD"]

    def calculate_loss(self: Any, interaction: Any) -> torch.Tensor:
        item = interaction[self.ITEM_ID]
        happened = interaction[self.LABEL] if self.LABEL in interaction else torch.ones_like(item)
        self.item_cnt.index_add_(0, item, happened.to(self.item_cnt.dtype)[:, None])
        self.max_cnt = self.item_cnt.amax(0)
        return torch.nn.Parameter(torch.zeros(1)).to(self.device)

    Pop.__init__, Pop.calculate_loss, Pop._counts_events = init, calculate_loss, True


def embed_several_numbers(layers: ModuleType) -> None:
    """RecBole joins several numerical_features of items at the wrong axis: RuntimeError."""
    Layer = layers.ContextSeqEmbAbstractLayer
    embed = Layer.embed_float_fields
    if hasattr(embed, "__wrapped__"):
        return

    @functools.wraps(embed)
    def embed_float_fields(self: Any, float_fields: Any, *args: Any, **named: Any) -> Any:
        if float_fields is not None:  # [..., 1, 2 fields] to [..., fields, 2]
            float_fields = float_fields.reshape(*float_fields.shape[:-2], -1, 2)
        return embed(self, float_fields, *args, **named)

    Layer.embed_float_fields = embed_float_fields


def report_metrics_together(quick_start: ModuleType) -> None:
    """objective_function reports to Ray by keywords; Ray takes one mapping: TypeError in a trial.

    Outside a trial Ray only warns that nobody listens.
    """
    tune = quick_start.tune
    if isinstance(tune, ModuleType):
        vars(quick_start)["tune"] = SimpleNamespace(report=lambda **metrics: tune.report(metrics))


# --- when a module of RecBole is imported ---


class _Watching(Loader):
    """A loader that runs actions: what they return, if anything, after the module has run."""

    def __init__(self, loader: Loader, actions: list[Action]) -> None:
        self.loader, self.actions = loader, actions

    def __getattr__(self, name: str) -> Any:  # whatever else a loader can do
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        afterwards = [action(module) for action in self.actions]
        self.loader.exec_module(module)
        for finish in afterwards:
            if finish is not None:
                finish()


class _Finder(MetaPathFinder):
    """Finds the modules that are watched, where they are found without it."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}
        self.searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.actions or self.searching:
            return None
        self.searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Watching(spec.loader, self.actions[name])
        return spec


_FINDER = _Finder()


def when_imported(name: str, action: Action) -> None:
    """Run an action around the first import of a module; at once if it was imported before.

    Args:
        name: of the module.
        action: called with the module, empty, before it runs; what it returns is called afterwards.
    """
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    if name in sys.modules:
        if (finish := action(sys.modules[name])) is not None:
            finish()
        return
    _FINDER.actions.setdefault(name, []).append(action)


def after(change: Callable[[ModuleType], None]) -> Action:
    """An action that changes a module after it has run."""
    return lambda module: lambda: change(module)
