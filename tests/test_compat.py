"""The fixes RecBole needs, each seen from outside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import scipy.sparse
import torch

from recbole_pos import compat
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.experiment.build import read_dataset


def test_a_fresh_process(tmp_path: Path) -> None:
    """RecBole's models switch anomaly mode on, which is put back; scikit-learn and tensorboard are
    imported when they are called, which nothing in ``sys.modules`` stands for."""
    code = """
import sys, torch
torch.autograd.set_detect_anomaly(True)
import recbole_pos
import recbole.model.sequential_recommender.sine
from recbole.evaluator import metrics
from recbole.utils import utils
print(torch.is_anomaly_enabled())
print([name for name in ("sklearn", "torch.utils.tensorboard") if name in sys.modules])
print(metrics.sk_auc([0, 0.5, 1], [0, 0.7, 1]), metrics.mean_squared_error([1, 2], [1, 4]))
print(type(utils.SummaryWriter(sys.argv[1])).__module__)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "board")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "[]", "0.6", "2.0", "torch.utils.tensorboard.writer"]
    assert not torch.is_anomaly_enabled()  # here RecBole was imported in the usual way


def test_only_missing_names_are_added() -> None:
    own = np.str_
    compat.prepare_recbole()
    assert np.float_ is np.float64 and np.str_ is own


def test_dok_matrix_can_be_filled_as_lightgcn_does() -> None:
    matrix = scipy.sparse.dok_matrix((2, 2))
    matrix._update({(0, 1): 3.0})
    assert matrix.tocsr()[0, 1] == 3


def test_what_is_no_tensor_stays_in_a_collector() -> None:
    """As RecBole 1.2.1 has it, which pip never takes beside today's Ray."""

    class Collector:
        def __init__(self) -> None:
            self.data_struct = SimpleNamespace(
                _data_dict={"data.num_items": 3, "rec": torch.ones(2)}
            )

        def get_data_struct(self) -> SimpleNamespace:
            values = self.data_struct._data_dict
            return SimpleNamespace(_data_dict={key: values[key].cpu() for key in values})

    module = ModuleType("collector")
    module.Collector = Collector
    compat.keep_plain_values(module)
    made = Collector()
    for found in (made.get_data_struct(), made.data_struct):
        assert found._data_dict["data.num_items"] == 3 and len(found._data_dict["rec"]) == 2


def test_missing_cells_are_filled(tmp_path: Path) -> None:
    """With every pandas: no name is 0, no number the mean of its column, no list an empty one."""
    tables = {
        "inter": "user_id:token\titem_id:token\ttimestamp:float\tstars:float\tshop:token\n"
        "u\ta\t1\t4\tx\nu\tb\t2\t\t\nu\tc\t3\t2\ty\nu\ta\t4\tNA\tx\n",
        "item": "item_id:token\tprice:float\tbrand:token\ttags:token_seq\tvector:float_seq\n"
        "a\t1\tA\tp q\t1 2\nb\t\t\t\t\n",
    }
    (tmp_path / "tiny").mkdir()
    for suffix, text in tables.items():
        (tmp_path / "tiny" / f"tiny.{suffix}").write_text(text)
    given = {"data_path": str(tmp_path), "filter_inter_by_user_or_item": False, "load_col": None}
    dataset = read_dataset(PosConfig("FPARec", "tiny", None, given))
    dataset.build()
    fields, items = dataset.log.fields, dataset.item_feat
    assert fields["stars"].tolist() == [4, 3, 2, 3] and fields["shop"].tolist() == [1, 0, 2, 1]
    assert items["price"].tolist() == [1, 1, 1, 1] and items["brand"].tolist() == [0, 1, 0, 0]
    assert items["tags"].tolist() == [[0, 0], [1, 2], [0, 0], [0, 0]]
    assert items["vector"].tolist() == [[0, 0], [1, 2], [0, 0], [0, 0]]
    assert {f: mask.sum() for f, mask in dataset.missing.items()} == {"stars": 2, "price": 3}
