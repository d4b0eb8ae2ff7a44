"""Time the training of our PosSASRec."""

from __future__ import annotations

import tempfile

import pandas as pd
import torch
from data import write_atomic
from peer_workers import common
from recbole.data.interaction import Interaction
from training import build


def main() -> None:
    job = common.Job.read()
    names = {"softmax": "CE", "sampled_softmax": "sampled_softmax", "bce": "BCE"}
    loss = {"loss_type": names[job.loss]} | ({"negatives": job.negatives} if job.negatives else {})
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
            **loss,
        )
    trainer = experiment.trainer
    loader = trainer.training_loader(experiment.loaders["train"])
    common.check_targets(loader.num_targets, job)
    model, dataset = experiment.model, experiment.dataset

    def score(histories: torch.Tensor) -> torch.Tensor:
        length = (histories != 0).sum(1)
        column = torch.arange(job.length) + (job.length - length)[:, None]
        items = histories.gather(1, column.clamp(max=job.length - 1))  # padded on the right
        items[torch.arange(job.length) >= length[:, None]] = 0
        batch = Interaction({model.ITEM_SEQ: items, model.ITEM_SEQ_LEN: length})
        return model.full_sort_predict(batch).view(len(items), -1)

    ids = {
        int(name): dataset.token2id("item_id", name)
        for name in dataset.id2token("item_id", range(1, dataset.item_num))
    }
    clock, epoch = common.make_clock(job, ids, model, score, 0), 0
    while not clock.done:
        trainer._train_epoch(loader, epoch)
        clock.tick(loader.num_targets)
        epoch += 1
    common.report(clock, dataset.item_num - 1, "recbole-pos", "recbole")


if __name__ == "__main__":
    main()
