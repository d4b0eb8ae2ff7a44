"""PosTrainer as one of several processes that train the same model.

Only the order of dropout and negatives differs from one process (see ``distributed.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from recbole.utils import ModelType, init_seed
from torch import Tensor

from recbole_pos import distributed
from recbole_pos.errors import UsageError
from recbole_pos.experiment.checkpoint import CheckpointWriter
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.trainer import PosTrainer
from recbole_pos.values import Options


class ParallelTrainer(PosTrainer):
    """A trainer on this process's part of every batch; all processes keep the same weights.

    Only the first process writes. Metrics are computed from all rows in every process, so all of
    them stop in the same epoch.
    """

    def __init__(self, config: Options, model: Any, run: RunFolder | None = None) -> None:
        if model.type == ModelType.TRADITIONAL:
            raise UsageError(f"nproc: {config['model']} has no gradients to share; use one process")
        if getattr(model, "needs_events", False):
            raise UsageError(
                f"nproc: the sequences of a batch of {config['model']} read each other, and a "
                "process would have a part of them; use one process, with threads or a GPU"
            )
        if getattr(model, "targets_meet", False) and model.later is not None:
            raise UsageError(
                f"nproc: target_window: {config['target_window']} is for one process where targets "
                "of a batch meet (SCE, in_batch); use target_window: 1 or another loss_type"
            )
        super().__init__(config, model, run)
        self.shard = distributed.current_shard()
        if getattr(model, "targets_meet", False):
            model.loss = distributed.over_whole_batch(model.loss, self.shard)
        self.evaluator = _Gathered(self.evaluator)
        self.shared: distributed.SharedLoss | None = None  # from the first epoch on

    def training_loader(self, train_data: Any) -> Any:
        """Return the loader of training, whose batches are this process's part."""
        loader = super().training_loader(train_data)
        loader.divide(self.shard)
        return loader

    def _train_epoch(
        self,
        train_data: Any,
        epoch_idx: int,
        loss_func: Any = None,
        show_progress: bool = False,
    ) -> dict[str, Any]:
        """Train an epoch; every process samples its own dropout and negatives.

        They depend on the epoch only, so a run that is resumed samples the same as it would have
        without the interruption.
        """
        init_seed(self._seed(epoch_idx), self.config["reproducibility"])
        if self.shared is None:
            loss = loss_func or self.adapter.loss(train_data.packed)
            self.shared = distributed.SharedLoss(self.model, loss)
        line = super()._train_epoch(
            train_data, epoch_idx, loss_func=self.shared, show_progress=show_progress
        )
        self.shared.same_buffers()
        return line

    def _seed(self, epoch: int) -> int:
        """Return the seed of this process in an epoch, distinct by two primes."""
        offset = 7919 * self.shard.rank + 104729 * epoch
        return (self.config["seed"] + offset) % 2**32

    def _table(self) -> None:
        """Return no item table: its gradient is sent between processes, and dense."""

    def _loss(self, loss_func: Any, batch: Any) -> Tensor:
        return super()._loss(loss_func, batch) * self.shard.weight

    def _value(self, loss: Tensor) -> Tensor:
        """Return the mean loss of the whole batch, NaN in all processes if it is in one."""
        return distributed.total(loss)

    def _targets(self, batch: Any) -> int:
        return self.shard.whole

    def _writer(self, saved: bool) -> CheckpointWriter:
        return super()._writer(saved and self.shard.rank == 0)

    def resume_checkpoint(self, resume_file: str, train_data: Any = None) -> None:
        """Take up a checkpoint, which every process reads before any writes."""
        super().resume_checkpoint(resume_file, train_data)
        torch.distributed.barrier()


class _Gathered:
    """RecBole's evaluator over the rows of all processes."""

    def __init__(self, evaluator: Any) -> None:
        self.evaluator = evaluator

    def evaluate(self, struct: Any) -> Any:
        """Compute metrics from the collected rows of all processes."""
        collected = struct._data_dict
        rows = {name: value for name, value in collected.items() if name.startswith("rec.")}
        for name, value in distributed.gather_rows(rows).items():
            struct.set(name, value)
        return self.evaluator.evaluate(struct)
