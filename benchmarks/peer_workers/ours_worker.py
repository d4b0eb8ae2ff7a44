"""Times the training of our PosSASRec."""

from __future__ import annotations

import tempfile

import pandas as pd
from data import write_atomic
from peer_workers.common import Clock, Job, check_targets, report, versions

from recbole_pos import __version__
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.experiment.run import prepare


def main() -> None:
    job = Job.read()
    with tempfile.TemporaryDirectory() as folder:
        write_atomic(pd.read_csv(job.events), folder, "events")
        config = PosConfig(
            "PosSASRec",
            "events",
            config_dict={
                "data_path": folder,
                "MAX_ITEM_LIST_LENGTH": job.length,
                "train_windows": "last",
                "eval_args": {"split": {"RS": [1, 0, 0]}},  # held-out events are gone already
                "train_batch_size": job.batch_size,
                "hidden_size": job.hidden_size,
                "n_layers": job.n_layers,
                "n_heads": job.n_heads,
                "inner_size": job.inner_size,
                "hidden_dropout_prob": job.dropout,
                "attn_dropout_prob": job.attention_dropout,
                "learner": "adam",
                "learning_rate": job.learning_rate,
                "use_gpu": job.accelerator == "gpu",
                "precision": "fp32",
                "seed": job.seed,
            },
        )
        experiment = prepare(config)
    trainer = experiment.trainer
    loader = trainer.training_loader(experiment.loaders["train"])
    check_targets(loader.targets, job)
    clock, epoch = Clock(job), 0
    while not clock.done:
        trainer._train_epoch(loader, epoch)
        clock.tick(loader.targets)
        epoch += 1
    packages = {"recbole_pos": __version__, **versions("recbole")}
    report(clock, experiment.dataset.item_num - 1, experiment.model, packages)


if __name__ == "__main__":
    main()
