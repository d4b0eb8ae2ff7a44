"""Train SASRec or BERT4Rec of RecTools, or ItemKNN of implicit, on an exported split."""

import time

import pandas as pd
import pytorch_lightning as pl
from implicit.nearest_neighbours import CosineRecommender
from peer_workers import lists
from rectools.dataset import Dataset
from rectools.models import BERT4RecModel, ImplicitItemKNNWrapperModel, SASRecModel


class StopEarly(lists.StopEarly, pl.Callback):
    """Early stopping on the validation requests; RecTools' own reads its loss."""


def make_dataset(log: pd.DataFrame) -> Dataset:
    """Return interactions of an exported split as RecTools reads them (docs/referee.md)."""
    times = pd.to_datetime(log["time"], unit="s")
    columns = {"user_id": log["user"], "item_id": log["item"], "weight": 1.0, "datetime": times}
    return Dataset.construct(pd.DataFrame(columns))


def main() -> None:
    task = lists.Task.read()
    pl.seed_everything(task.seed)
    train, valid = task.read_split("train"), task.read_split("valid")
    dataset = make_dataset(train)
    is_filtered = bool(task.read_split("test_requests")["excludes_seen"].all())
    if task.model == "itemknn":
        model = ImplicitItemKNNWrapperModel(CosineRecommender(num_threads=1))
    else:
        settings = dict(task.settings)
        scale = {"use_scale_factor": settings.pop("use_scale_factor", False)}
        chosen = {"sasrec": SASRecModel, "bert4rec": BERT4RecModel}[task.model]
        model = chosen(pos_encoding_kwargs=scale, **settings)

    def recommend(known: Dataset, length: int) -> pd.DataFrame:
        """Return lists for all users, given what is known of them."""
        model.is_fitted = True  # it refuses to recommend between epochs
        found = model.recommend(known.user_id_map.external_ids, known, length, is_filtered)
        return found.rename(columns={"user_id": "request", "item_id": "item"})

    stop = StopEarly(task, lambda: recommend(dataset, 10))
    if task.settings:
        model._trainer = pl.Trainer(max_epochs=task.max_epochs, callbacks=[stop], **lists.QUIET)
    began = time.process_time()
    model.fit(dataset)
    seconds, epochs = time.process_time() - began, getattr(model, "epochs", 1)
    if task.settings:
        seconds, epochs = stop.seconds, len(stop.scores)
        model.lightning_model.load_state_dict(stop.weights)

    # Items that were not trained are unknown to all models here.
    both = pd.concat([train, valid[valid["item"].isin(train["item"])]])
    task.write(recommend(make_dataset(both), lists.LENGTH), seconds, epochs, "rectools")


if __name__ == "__main__":
    main()
