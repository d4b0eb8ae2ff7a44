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
    for _ in range(2):
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
