"""Options that do not go together, or not with a model or its data: an error names one of them."""

import pickle
from typing import Any

import pytest
from conftest import CROSS_ENTROPY

from recbole_pos.errors import StorageError, UnknownKey, UsageError
from recbole_pos.experiment.run import NeedsDataset

UNIFORM = {"train_neg_sample_args": {"distribution": "uniform"}}
BY_POSITION = {"augmentation": "all_positions"}
AT_REQUEST = {"request_time": "target"}
PLAIN = CROSS_ENTROPY["AttrFormer"]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # losses
    ("GRU4Rec", {"loss_type": "gBCE"}, "loss_type"),
    ("PosSASRec", {"loss_type": "in_batch", "negatives": 5}, "negatives"),
    ("PosSASRec", {"loss_type": "gBCE", "negative_sampler": "popularity"}, "negative_sampler"),
    ("GRU4Rec", {**BY_POSITION, "target_window": 3}, "target_window"),
    ("AttrFormer", {"target_window": 3}, "target_window.*future_weights"),
    ("AttrFormer", {"future_weights": [0.25, 1.0]}, "^future_weights"),
    ("AttrFormer", {**PLAIN, "loss_type": "SCE", "future_weights": [1.0, 0.5]}, "^loss_type: SCE"),
    ("FPARec", {"loss_type": "SCE", **UNIFORM}, "SCE"),
    ("GRU4Rec", {**BY_POSITION, "loss_type": "BPR", **UNIFORM}, "^loss_type: .*augmentation"),
    # windows and data
    ("NARM", BY_POSITION, "NARM can train with prefix or none"),
    ("FGNN", {"train_windows": "chunk"}, "^train_windows: FGNN"),
    ("AttrFormer", {"train_windows": "last"}, "^chunking"),
    ("AttrFormer", {"augmentation": "prefix"}, "^chunking"),
    ("PosSASRec", {"window_stride": 3}, "train_windows: sliding"),
    ("PosSASRec", {"TIME_FIELD": "when"}, "when"),
    ("PosSASRec", {"user_inter_num_interval": "[1000,inf)"}, "no interaction"),
    ("PosSASRec", {"val_interval": {"item_id": "[3,inf)"}}, "val_interval: field 'item_id'"),
    ("PosSASRec", {"item_inter_num_interval": "[24,inf)"}, "topk: 20"),
    # positions
    ("PosRec", {"position": ["ldpe", "rope"]}, "^position: .*rope"),
    ("PosRec", {"position": ["difsr"], "difsr_fields": ["genre"]}, "^position: .*found difsr"),
    ("EncodedSTAMP", {"position": ["time_learned"]}, "^position: "),
    # what would not read the time of a request
    ("PosSASRec", {**AT_REQUEST, "position": ["learned"]}, "^configuration: request_time"),
    ("SASRec", AT_REQUEST, "^configuration: request_time"),
    # what has no graph to compile
    ("PosRec", {"compile": True}, "^compile: PosRec"),
    ("SASRec", {"compile": True}, "^compile: SASRec"),
    ("FPARec", {"compile": True, "augmentation": "prefix"}, "^compile: FPARec"),
]


@pytest.mark.parametrize(("model", "options", "named"), REFUSED, ids=str)
def test_what_does_not_go_together(experiment, model: str, options: dict, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        made = experiment(model, **options)
        made.trainer.training_loader(made.loaders["train"])


def test_errors_come_back_from_a_pool_of_processes() -> None:
    """Which pickles them: one that cannot be read again breaks the pool."""
    missing = NeedsDataset("k", {"dataset": "shop", "data_path": "dataset/shop"})
    for error in (UnknownKey("no key a", "a"), missing, StorageError("a file")):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
