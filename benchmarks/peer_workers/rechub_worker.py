"""Time the training of torch-rechub's SASRec: a target and one negative at each position."""

from __future__ import annotations

import pandas as pd
import torch
from peer_workers import common
from torch.nn.functional import binary_cross_entropy_with_logits
from torch_rechub.basic.features import SequenceFeature
from torch_rechub.models.matching.sasrec import SASRec


def make_sequences(events: pd.DataFrame, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, both [users, length], padded on the left with 0."""
    histories = events.groupby("user_id")["number"].agg(list).str[-length - 1 :]
    padded = torch.tensor([[0] * (length + 1 - len(items)) + items for items in histories])
    inputs, targets = padded[:, :-1], padded[:, 1:]
    return inputs, targets.where(inputs != 0, 0)


def main() -> None:
    job = common.Job.read()
    events = pd.read_csv(job.events).sort_values(["user_id", "timestamp"])
    codes, items = pd.factorize(events["item_id"])
    inputs, targets = make_sequences(events.assign(number=codes + 1), job.length)
    common.check_targets(int((targets != 0).sum()), job)
    features = [
        SequenceFeature(name, len(items) + 1, job.hidden_size, pooling="concat", shared_with=shared)
        for name, shared in (("seq", None), ("pos", "seq"), ("neg", "seq"))
    ]
    model = SASRec(features, job.length, job.dropout, job.n_layers, job.n_heads)
    common.set_attention_dropout(model, job.attention_dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=job.learning_rate)

    def score(histories: torch.Tensor) -> torch.Tensor:
        batch = {"seq": histories}
        states = model.seq_forward(batch, model.item_emb(batch, model.features[:1])[:, 0])
        return states[:, -1] @ model.item_emb.embed_dict["seq"].weight.T

    ids = {int(item): number for number, item in enumerate(items, 1)}
    clock = common.make_clock(job, ids, model, score, 0)
    model.train()

    def compute(rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        batch = {"seq": inputs[rows], "pos": targets[rows]}
        batch["neg"] = torch.randint(1, len(items) + 1, batch["pos"].shape)
        is_target = batch["pos"] != 0
        logits = torch.stack([scores[is_target] for scores in model(batch)])
        labels = torch.tensor([[1.0], [0.0]]).expand_as(logits)
        return binary_cross_entropy_with_logits(logits, labels), int(is_target.sum())

    common.train(
        clock, optimizer, lambda: torch.randperm(len(inputs)).split(job.batch_size), compute
    )
    common.report(clock, len(items), "torch-rechub")


if __name__ == "__main__":
    main()
