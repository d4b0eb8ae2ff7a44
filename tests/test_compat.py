"""The fixes RecBole needs, each seen from outside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

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


def test_what_few_metrics_need_is_imported_when_they_are_asked(tmp_path: Path) -> None:
    code = """
import sys
import recbole_pos
from recbole.evaluator import metrics
from recbole.utils import utils
print({"sklearn", "torch.utils.tensorboard"} & set(sys.modules))
print(metrics.sk_auc([0, 0.5, 1], [0, 0.7, 1]), metrics.mean_squared_error([1, 2], [1, 4]))
import sklearn.metrics
print(sklearn.metrics.__spec__ is not None)
print(type(utils.SummaryWriter(sys.argv[1])).__module__)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "board")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["set()", "0.6", "2.0", "True", "torch.utils.tensorboard.writer"]


def test_a_stand_in_has_nothing_that_every_module_has() -> None:
    """``inspect`` asks all modules for their ``__file__``, also while torch is imported."""
    take_away = compat.import_when_called("no.such.module")(ModuleType("of_recbole"))
    assert not hasattr(sys.modules["no.such.module"], "__file__")
    assert callable(sys.modules["no.such.module"].anything)
    take_away()
    assert "no.such.module" not in sys.modules


def test_only_missing_numpy_names_are_added() -> None:
    own = np.str_
    compat.add_numpy_aliases()
    assert np.float_ is np.float64 and np.str_ is own


def test_dok_matrix_can_be_filled_as_lightgcn_does() -> None:
    matrix = scipy.sparse.dok_matrix((2, 2))
    matrix._update({(0, 1): 3.0})
    assert matrix.tocsr()[0, 1] == 3
