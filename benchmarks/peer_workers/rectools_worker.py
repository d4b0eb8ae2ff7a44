"""Times the training of RecTools' SASRecModel."""

from __future__ import annotations

import pandas as pd
from peer_workers.common import (
    Clock,
    Job,
    check_targets,
    report,
    set_attention_dropout,
    versions,
)
from pytorch_lightning import Callback, Trainer
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import SASRecModel


class Timing(Callback):
    """Counts the targets of each step and stops the training when enough was timed."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def on_train_start(self, trainer, pl_module) -> None:
        check_targets(
            sum(int((batch["y"] != 0).sum()) for batch in trainer.train_dataloader), self.job
        )
        set_attention_dropout(pl_module, self.job.attention_dropout)
        self.clock = Clock(self.job)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.clock.tick(int((batch["y"] != 0).sum()))
        trainer.should_stop = self.clock.done


def main() -> None:
    job = Job.read()
    events = pd.read_csv(job.events).rename(
        columns={"user_id": Columns.User, "item_id": Columns.Item, "timestamp": Columns.Datetime}
    )
    events[Columns.Datetime] = pd.to_datetime(events[Columns.Datetime], unit="s")
    events[Columns.Weight] = 1.0

    def trainer() -> Trainer:
        # RecTools' own trainer, but without an end and where the job says
        return Trainer(
            max_epochs=-1,
            accelerator=job.accelerator,
            devices=1,
            callbacks=[Timing(job)],
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
    items = len(model.data_preparator.get_known_item_ids())
    report(timing.clock, items, model.torch_model, versions("rectools", "pytorch-lightning"))


if __name__ == "__main__":
    main()
