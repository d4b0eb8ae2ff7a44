"""Types of the dataset attributes that this package reads; RecBole declares none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from recbole.data.interaction import Interaction
from recbole.utils import FeatureType
from scipy.sparse import spmatrix

from recbole_pos.data.interactions import EventLog
from recbole_pos.data.targets import Split
from recbole_pos.values import Options


class Dataset(Protocol):
    """A dataset after ``build``, or the part of one phase, as models and relations read it.

    Attributes:
        user_counts: [users] interactions of each before the split left any out.
        missing: [users], [items] or [interactions] bool, by float field: cells without a number.
        part: [interactions] TRAIN, VALID or TEST, of ``splits.py``.
    """

    config: Options
    dataset_name: str
    dataset_path: str
    uid_field: str
    iid_field: str
    time_field: str
    field2type: dict[str, FeatureType]
    user_feat: Interaction | None
    item_feat: Interaction | None

    item_num: int
    user_num: int
    user_counts: np.ndarray
    field2id_token: dict[str, np.ndarray]
    field2token_id: dict[str, Mapping[str, int]]
    missing: dict[str, np.ndarray]
    split: Split

    @property
    def log(self) -> EventLog: ...

    @property
    def part(self) -> np.ndarray: ...

    @property
    def popularity(self) -> np.ndarray: ...

    @property
    def target_counts(self) -> np.ndarray: ...

    def inter_matrix(self, form: str = "coo", value_field: str | None = None) -> spmatrix:
        """Return [users, items] interactions of the phase."""
