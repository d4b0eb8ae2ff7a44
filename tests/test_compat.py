"""The fixes RecBole needs, each seen from outside."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import scipy.sparse

from recbole_pos import compat


def test_anomaly_mode_stays_as_it_was() -> None:
    """In a fresh process: importing RecBole's models switches it on, the plugin puts it back."""
    code = (
        "import torch; {}import recbole_pos; import recbole.model.sequential_recommender.sine; "
        "print(torch.is_anomaly_enabled())"
    )
    for before, expected in (("", "False"), ("torch.autograd.set_detect_anomaly(True); ", "True")):
        done = subprocess.run(
            [sys.executable, "-c", code.format(before)], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == expected


def test_only_missing_numpy_names_are_added() -> None:
    own = np.str_
    compat.add_numpy_aliases()
    assert np.float_ is np.float64 and np.str_ is own


def test_dok_matrix_can_be_filled_as_lightgcn_does() -> None:
    matrix = scipy.sparse.dok_matrix((2, 2))
    matrix._update({(0, 1): 3.0})
    assert matrix.tocsr()[0, 1] == 3
