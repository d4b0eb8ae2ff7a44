"""A generated log of any size, without files, and a trainer for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from recbole.utils import init_seed

import recbole_pos  # noqa: F401  (RecBole needs its fixes to start at all on this numpy)
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.events import EventLog
from recbole_pos.data.loaders import WindowLoader
from recbole_pos.data.windows import Windows, training_windows
from recbole_pos.experiment.trainer import PosTrainer


@dataclass(frozen=True)
class Size:
    """Of a log and of the model that learns from it."""

    users: int
    items: int
    events: int
    length: int
    d: int
    layers: int
    batch: int


class Generated:
    """What a model and a loader read of a dataset, around a log that no file holds."""

    def __init__(self, log: EventLog, items: int, length: int) -> None:
        self._log, self.item_num, self.user_num = log, items + 1, len(log.offsets) - 1
        self.length = length

    @property
    def log(self) -> EventLog:
        return self._log

    def num(self, field: str) -> int:
        """Ids of a field, padding included."""
        return self.item_num if field == self._log.item_field else self.user_num

    def training_windows(self) -> Windows:
        """All events are for training."""
        offsets = self._log.offsets
        return training_windows(offsets[:-1], offsets[1:], self.length, "chunk", None)


def generated(size: Size) -> Generated:
    """Long and short histories, items of popularity 1 / rank, times that grow.

    Histories are log-normal as MovieLens', where the mean is 145 events and the median 68.
    """
    rng = np.random.default_rng(0)
    share = rng.lognormal(0.0, 1.2, size.users)
    lengths = np.maximum(share / share.sum() * size.events, 2).astype(np.int64)
    offsets = np.concatenate(([0, 0], np.cumsum(lengths)))  # no one has id 0
    total = int(offsets[-1])
    rank = np.floor(np.exp(rng.random(total) * np.log(size.items + 1))).astype(np.int64)
    fields = {
        "user_id": torch.from_numpy(np.repeat(np.arange(1, size.users + 1), lengths)),
        "item_id": torch.from_numpy(np.minimum(rank, size.items)),
        "timestamp": torch.from_numpy(1e9 + np.arange(total, dtype=np.float64)),
    }
    log = EventLog(fields, offsets, "user_id", "item_id", "timestamp")
    return Generated(log, size.items, size.length)


def trainer_of(size: Size, **options: Any) -> tuple[PosTrainer, WindowLoader]:
    """PosSASRec, as its defaults are but for the sizes, and a loader of a generated log."""
    config = PosConfig(
        "PosSASRec",
        "ml-100k",  # whose files are not read
        config_dict={
            "MAX_ITEM_LIST_LENGTH": size.length,
            "hidden_size": size.d,
            "inner_size": 4 * size.d,
            "n_layers": size.layers,
            "n_heads": max(size.d // 64, 1),
            "attn_dropout_prob": 0.0,
            "train_batch_size": size.batch,
            "show_progress": False,
            **options,
        },
    )
    init_seed(config["seed"], config["reproducibility"])
    data = generated(size)
    model = config.model_class(config, data).to(config["device"])
    trainer = PosTrainer(config, model)
    return trainer, WindowLoader(config, data, trainer.adapter.requirements())
