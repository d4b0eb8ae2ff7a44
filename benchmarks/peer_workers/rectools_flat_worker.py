"""Time the training of RecTools' ``FlatSASRecNet`` in a plain loop, as its tests do it."""

import sys

import pandas as pd
import torch
from peer_workers import common
from rectools.fast_transformers import FlatSASRecNet, SequenceBatchDataset, build_sequences
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def compute_loss(net: FlatSASRecNet, batch: dict, negatives: int) -> tuple[torch.Tensor, int]:
    """Return cross-entropy over all items, or target and negatives, and the number of targets."""
    targets = batch["y"].flatten()
    if negatives:
        sampled = torch.randint(1, net.n_items + 1, (*batch["y"].shape, negatives))
        logits = net({**batch, "negatives": sampled}).flatten(0, 1)
        labels = torch.where(targets == 0, -100, 0)
    else:
        logits, labels = net(batch).flatten(0, 1), torch.where(targets == 0, -100, targets - 1)
    return cross_entropy(logits, labels), int((targets != 0).sum())


def main() -> None:
    job = common.Job.read()
    events = pd.read_csv(job.events)
    columns = (
        torch.tensor(events[name].to_numpy()) for name in ("user_id", "item_id", "timestamp")
    )
    x, y, items, _ = build_sequences(*columns, max_len=job.length)
    common.check(job, targets=int((y != 0).sum()), items=len(items))
    net = FlatSASRecNet(
        len(items), job.hidden_size, job.n_layers, job.n_heads, job.length, job.dropout
    )
    common.set_attention_dropout(net, job.attention_dropout)
    optimizer = torch.optim.Adam(net.parameters(), lr=job.learning_rate)
    loader = DataLoader(SequenceBatchDataset(x, y), batch_size=job.batch_size, shuffle=True)
    clock = common.Clock(job)
    net.train()
    while not clock.done:
        for batch in loader:
            loss, targets = compute_loss(net, batch, job.negatives)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            clock.tick(targets)
            if clock.done:
                break
    if not loss.isfinite():
        sys.exit("the loss is not finite")
    clock.report()


if __name__ == "__main__":
    main()
