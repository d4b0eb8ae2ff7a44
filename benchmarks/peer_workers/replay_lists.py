"""Train RePlay's SasRec on an exported split, and write its lists."""

import lightning
import numpy as np
import pandas as pd
import torch
from peer_workers import lists
from peer_workers.replay_worker import fit, make_schema
from replay.nn.lightning import LightningModule
from replay.nn.lightning.optimizer import OptimizerFactory
from replay.nn.sequential import SasRec

# Of ``SasRec.from_params``, and the batch of RePlay's example.
DEFAULTS = {"embedding_dim": 192, "max_sequence_length": 50, "lr": 1e-3, "batch_size": 512}


class StopEarly(lists.StopEarly, lightning.Callback):
    """Early stopping on the validation requests, by the metric of all sides."""


@torch.no_grad()
def recommend(
    model: SasRec, requests: pd.DataFrame, items: pd.Index, length: int, k: int
) -> pd.DataFrame:
    """Return lists of k items for each request: request, item, rank from 1.

    Args:
        model: the model, which numbers items from 0 on; the number of all items stands for padding.
        requests: request and history of each, and whether its items are left out of the list.
        items: names of the items in the order of their numbers.
        length: newest items of a history that the model reads.
        k: items of a list.
    """
    model.eval()
    blocks = []
    for start in range(0, len(requests), 256):
        block = requests["history"].iloc[start : start + 256]
        seen = [items.get_indexer(history) for history in block]
        seen = [numbers[numbers >= 0] for numbers in seen]  # without items that were not trained
        inputs = torch.full((len(block), length), len(items))  # padded on the left
        for row, numbers in zip(inputs, seen, strict=True):
            row[length - len(numbers[-length:]) :] = torch.from_numpy(numbers[-length:])
        mask = inputs != len(items)
        scores = model(feature_tensors={"item_id": inputs}, padding_mask=mask)["logits"]
        rows = np.repeat(np.arange(len(block)), [len(numbers) for numbers in seen])
        if requests["excludes_seen"].all():
            scores[rows, np.concatenate(seen)] = -torch.inf
        blocks.append(scores.topk(k).indices.numpy())
    best = np.concatenate(blocks)  # [requests, k]
    columns = {"request": np.repeat(requests["request"].to_numpy(), k), "item": items[best.ravel()]}
    return pd.DataFrame({**columns, "rank": np.tile(np.arange(1, k + 1), len(best))})


def main() -> None:
    task = lists.Task.read()
    lightning.seed_everything(task.seed)
    train, requests = task.read_split("train"), task.read_split("valid_requests")
    codes, names = pd.factorize(train["item"])
    items = pd.Index(names)
    sequences = train.assign(item=codes).groupby("user", sort=False)["item"].agg(list)

    settings = dict(task.settings or DEFAULTS)
    rate, batch_size = settings.pop("lr"), settings.pop("batch_size")
    length = settings["max_sequence_length"]
    schema = make_schema(len(items), settings["embedding_dim"])
    model = SasRec.from_params(schema, **settings)
    module = LightningModule(model, optimizer_factory=OptimizerFactory(learning_rate=rate))
    stop = StopEarly(task, lambda: recommend(model, requests, items, length, 10))
    fit(module, schema, sequences, stop, length, batch_size, max_epochs=task.max_epochs)
    module.load_state_dict(stop.weights)
    found = recommend(model, task.read_split("test_requests"), items, length, lists.LENGTH)
    task.write(found, stop.seconds, len(stop.scores), "replay-rec")


if __name__ == "__main__":
    main()
