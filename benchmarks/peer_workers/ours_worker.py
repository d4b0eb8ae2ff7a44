"""Time the training of our PosSASRec."""

from __future__ import annotations

import tempfile

import pandas as pd
from data import write_atomic
from peer_workers import common
from training import build


def main() -> None:
    job = common.Job.read()
    sampled = {"loss_type": "sampled_softmax", "negatives": job.negatives}
    with tempfile.TemporaryDirectory() as folder:
        write_atomic(pd.read_csv(job.events), folder, "events")
        experiment = build(
            "PosSASRec",
            "events",
            data_path=folder,
            MAX_ITEM_LIST_LENGTH=job.length,
            train_windows="last",
            eval_args={"split": {"RS": [1, 0, 0]}},  # held-out interactions are gone already
            train_batch_size=job.batch_size,
            hidden_size=job.hidden_size,
            n_layers=job.n_layers,
            n_heads=job.n_heads,
            inner_size=job.inner_size,
            hidden_act=job.activation,
            hidden_dropout_prob=job.dropout,
            attn_dropout_prob=job.attention_dropout,
            learner="adam",
            learning_rate=job.learning_rate,
            seed=job.seed,
            **(sampled if job.negatives else {}),
        )
    trainer = experiment.trainer
    loader = trainer.training_loader(experiment.loaders["train"])
    common.check_targets(loader.num_targets, job)
    clock, epoch = common.Clock(job), 0
    while not clock.done:
        trainer._train_epoch(loader, epoch)
        clock.tick(loader.num_targets)
        epoch += 1
    common.report(clock, experiment.dataset.item_num - 1, "recbole-pos", "recbole")


if __name__ == "__main__":
    main()
