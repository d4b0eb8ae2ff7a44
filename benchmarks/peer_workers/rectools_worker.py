"""Time the training of RecTools' SASRecModel."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from peer_workers import common
from pytorch_lightning import Callback, Trainer
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import SASRecModel


class Timing(Callback):
    """Counts the targets of each step and stops the training when enough was timed."""

    def __init__(self, job: common.Job, items: Callable[[], np.ndarray]) -> None:
        self.job, self.items = job, items

    def on_train_start(self, trainer, pl_module) -> None:
        common.check_targets(
            sum(int((batch["y"] != 0).sum()) for batch in trainer.train_dataloader), self.job
        )
        common.set_attention_dropout(pl_module, self.job.attention_dropout)
        model = pl_module.torch_model

        def score(histories: torch.Tensor) -> torch.Tensor:
            batch = {"x": histories.to(pl_module.device)}
            vectors = model.item_model.get_all_embeddings()
            return model.encode_sessions(batch, vectors)[:, -1] @ vectors.T

        ids = {item: number for number, item in enumerate(self.items())}
        self.clock = common.make_clock(self.job, ids, model, score, 0)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.clock.tick(int((batch["y"] != 0).sum()))
        trainer.should_stop = self.clock.done


def main() -> None:
    job = common.Job.read()
    events = pd.read_csv(job.events).rename(
        columns={"user_id": Columns.User, "item_id": Columns.Item, "timestamp": Columns.Datetime}
    )
    events[Columns.Datetime] = pd.to_datetime(events[Columns.Datetime], unit="s")
    events[Columns.Weight] = 1.0

    def items() -> np.ndarray:
        return model.data_preparator.item_id_map.external_ids

    def trainer() -> Trainer:
        # as RecTools' own, but without an end and on the device of the job
        return Trainer(
            max_epochs=-1,
            accelerator=job.accelerator,
            devices=1,
            callbacks=[Timing(job, items)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    model = SASRecModel(
        n_blocks=job.n_layers,
        n_heads=job.n_heads,
        n_factors=job.hidden_size,  # also the inner size of the feed-forward, not an option here
        dropout_rate=job.dropout,
        session_max_len=job.length,
        loss="softmax",
        lr=job.learning_rate,
        batch_size=job.batch_size,
        get_trainer_func=trainer,
    )
    model.fit(Dataset.construct(events))
    timing = next(c for c in model.fit_trainer.callbacks if isinstance(c, Timing))
    known = len(model.data_preparator.get_known_item_ids())
    common.report(
        timing.clock, known, model.torch_model, common.versions("rectools", "pytorch-lightning")
    )


if __name__ == "__main__":
    main()
