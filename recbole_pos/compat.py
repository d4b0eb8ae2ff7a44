"""Every fix that RecBole 1.2.x needs, most of them for today's numpy; no other file patches it.

Each function is one fix and says what breaks without it. All are safe to apply twice, and are
applied when RecBole is imported, before or after this package.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from recbole_pos.on_import import after, when_imported

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
    when_imported("recbole.config.configurator", after(skip_numpy_settings_of_config))
    when_imported("recbole.model.sequential_recommender.sine", keep_anomaly_mode_as_it_is)
    when_imported("recbole.model.general_recommender.pop", after(count_every_event_in_pop))


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
    """RecBole fills missing values in a way pandas 3 will not support; pandas<3 is required."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"recbole\.")


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
