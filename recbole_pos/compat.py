"""Every fix that RecBole 1.2.x needs, most of them for today's numpy; no other file patches it.

Each function is one fix and says what breaks without it. All are safe to apply twice.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import scipy.sparse
import torch

# Names that numpy 1.24 and 2.0 removed and RecBole 1.2 still uses.
_NUMPY_ALIASES = {
    "float": np.float64,
    "float_": np.float64,
    "int": np.int64,
    "complex": np.complex128,
    "complex_": np.complex128,
    "object": np.object_,
    "str": np.str_,
    "unicode_": np.str_,
    "unicode": np.str_,
}


def apply() -> None:
    """Apply all fixes. Called once when ``recbole_pos`` is imported."""
    add_numpy_aliases()
    add_dok_matrix_update()
    keep_anomaly_mode_off()
    skip_numpy_settings_of_config()
    silence_pandas_warnings()
    count_every_event_in_pop()


def add_numpy_aliases() -> None:
    """RecBole reads np.float, np.float_ and others: AttributeError with numpy 2."""
    for name, target in _NUMPY_ALIASES.items():
        if name not in np.__dict__:
            setattr(np, name, target)


def add_dok_matrix_update() -> None:
    """LightGCN, NGCF and others call dok_matrix._update, gone since scipy 1.13: AttributeError."""
    if not hasattr(scipy.sparse.dok_matrix, "_update"):
        scipy.sparse.dok_matrix._update = lambda self, data: self._dict.update(data)


def keep_anomaly_mode_off() -> None:
    """RecBole's SINE switches autograd anomaly detection on for the whole process when imported.

    Every model imported with it then trains 20-25% slower. Importing the package here, once, and
    restoring the mode leaves nothing to switch on later.
    """
    was_on = torch.is_anomaly_enabled()
    import recbole.model.sequential_recommender  # noqa: F401

    torch.autograd.set_detect_anomaly(was_on)


def skip_numpy_settings_of_config() -> None:
    """Config.compatibility_settings assigns from np.float_ and others, gone in numpy 2."""
    from recbole.config import Config

    Config.compatibility_settings = lambda self: add_numpy_aliases()


def silence_pandas_warnings() -> None:
    """RecBole fills missing values in a way pandas 3 will not support; pandas<3 is required."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"recbole\.")


def count_every_event_in_pop() -> None:
    """RecBole's Pop counts an item once a batch, and sampled negatives like events.

    With the usual batches all popular items are then level, and the list is close to random.
    """
    from recbole.model.general_recommender import Pop

    if hasattr(Pop, "_counts_events"):
        return
    build = Pop.__init__

    def init(self: Pop, config: Any, dataset: Any) -> None:
        build(self, config, dataset)
        self.LABEL = config["LABEL_FIELD"]

    def calculate_loss(self: Pop, interaction: Any) -> torch.Tensor:
        item = interaction[self.ITEM_ID]
        happened = interaction[self.LABEL] if self.LABEL in interaction else torch.ones_like(item)
        self.item_cnt.index_add_(0, item, happened.to(self.item_cnt.dtype)[:, None])
        self.max_cnt = self.item_cnt.amax(0)
        return torch.nn.Parameter(torch.zeros(1)).to(self.device)

    Pop.__init__, Pop.calculate_loss, Pop._counts_events = init, calculate_loss, True
