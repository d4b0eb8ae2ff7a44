"""``_load_feat`` of ours and of RecBole, on one file."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pandas as pd
from recbole.data.dataset import Dataset
from recbole.utils import FeatureSource

from recbole_pos.data.loading import AtomicTables, spell_out

DEFAULTS = dict.fromkeys(("load_col", "unload_col", "seq_len", "encoding"))
DEFAULTS |= {"field_separator": "\t", "seq_separator": " "}


class Reader(AtomicTables):
    """What ``_load_feat`` needs of a dataset, ours and RecBole's."""

    uid_field, iid_field, time_field = "user_id", "item_id", "timestamp"
    _get_load_and_unload_col = Dataset._get_load_and_unload_col
    logger = logging.getLogger()

    def __init__(self, **options) -> None:
        self.config = {**DEFAULTS, **options}
        self.field2type, self.field2source = {}, {}
        self.field2seqlen, self.field2bucketnum = {}, {}

    def through_pandas(self, file: Path, source: FeatureSource) -> pd.DataFrame:
        return Dataset._load_feat(self, str(file), source)

    def facts(self) -> tuple:
        return self.field2type, self.field2source, self.field2seqlen, self.field2bucketnum


def same_tables(ours: pd.DataFrame, peer: pd.DataFrame) -> None:
    assert list(ours) == list(peer) and ours.index.equals(peer.index)
    ours = spell_out(ours)
    for name in ours:
        one, other = ours[name], peer[name]
        assert one.dtype == other.dtype, name
        if one.dtype == np.float64:  # pandas is right to the last digit but one
            np.testing.assert_allclose(one, other, rtol=1e-15, atol=0)
        elif isinstance(one.iloc[0], np.ndarray):
            assert [a.dtype for a in one] == [a.dtype for a in other]
            assert all(
                np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
                for a, b in zip(one, other, strict=True)
            )
        else:
            pd.testing.assert_series_equal(one, other)


def compare(
    file: Path, source: FeatureSource = FeatureSource.INTERACTION, **options
) -> pd.DataFrame:
    ours, peer = Reader(**options), Reader(**options)
    table = ours._load_feat(str(file), source)
    same_tables(table, peer.through_pandas(file, source))
    assert ours.facts() == peer.facts()
    return table
