"""Time the training of our PosSASRec."""

import tempfile
from typing import Any

import pandas as pd
from data import write_atomic
from peer_workers import common
from training import build


def main() -> None:
    job = common.Job.read()
    sampled = {"loss_type": "sampled_softmax", "negatives": job.negatives}
    with tempfile.TemporaryDirectory() as folder:
        write_atomic(pd.read_csv(job.events), folder, "events")
        same = ("hidden_size", "n_layers", "n_heads", "inner_size", "learning_rate", "seed")
        options: dict[str, Any] = {name: getattr(job, name) for name in same}
        options |= {"MAX_ITEM_LIST_LENGTH": job.length, "train_batch_size": job.batch_size}
        options |= {"hidden_act": job.activation, "hidden_dropout_prob": job.dropout}
        options |= {"attn_dropout_prob": job.attention_dropout, "learner": "adam"}
        options |= {"data_path": folder, "train_windows": "last"}
        options["eval_args"] = {"split": {"RS": [1, 0, 0]}}  # held-out ones are gone already
        options |= sampled if job.negatives else {}
        experiment = build("PosSASRec", "events", **options)
    trainer = experiment.trainer
    loader = trainer.training_loader(experiment.loaders["train"])
    common.check(job, targets=loader.num_targets, items=experiment.dataset.item_num - 1)
    clock, epoch = common.Clock(job), 0
    while not clock.done:
        trainer._train_epoch(loader, epoch)
        clock.tick(loader.num_targets)
        epoch += 1
    clock.report()


if __name__ == "__main__":
    main()
