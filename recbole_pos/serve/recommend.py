"""What a trained model recommends: the items most likely to come next, for every user."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from recbole_pos.data.dataset import Kind
from recbole_pos.data.protocols import Dataset
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import Experiment
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.memory import keep_freed_memory
from recbole_pos.experiment.run import load
from recbole_pos.files import whole
from recbole_pos.screen import Screen
from recbole_pos.values import is_whole

_FEW = 30  # recommendations that are shown, too


def recommend(
    run_dir: str | Path,
    users: Sequence[str] | None = None,
    k: int = 10,
    mask_history: bool | None = None,
) -> pd.DataFrame:
    """The k items with the highest scores after everything a user has done, best first.

    Histories are whole: what was held out from training is read too, like any other event.

    >>> found = recbole_pos.recommend("mine", users=["196", "22"], k=5)
    >>> list(found), len(found)
    (['user_id', 'rank', 'item_id', 'score'], 10)

    Args:
        run_dir: the folder of a run, finished or not; its best weights are used.
        users: names of users (of sessions, where these are the users), each taken once; all with
            an event if None.
        k: items a user. Where fewer are left to recommend, there are fewer rows.
        mask_history: whether items of a user's past are left out; None for what the run was
            evaluated with.

    Returns:
        A row per recommendation, users in the order given (or of the data) and items best first:
        the user field, ``rank`` from 1, the item field and ``score``.

    Raises:
        UsageError: for users without an event, or a k that is more than there are items.
        CheckpointError: if the data have changed since training.
    """
    made = _prepare(run_dir, users, mask_history)
    return pd.concat(_parts(made, k), ignore_index=True)


def write_recommendations(
    run_dir: str | Path,
    users: Sequence[str] | None = None,
    k: int = 10,
    mask_history: bool | None = None,
    out: str | Path | None = None,
) -> Path:
    """As above, into a csv file, batch by batch, so that memory does not grow with users.

    Args:
        out: the file; ``recommendations.csv`` in the run folder when None. A pipe or
            ``/dev/stdout`` is written to as it is.

    Raises:
        StorageError: if the file cannot be written; one that was there is as it was.
    """
    keep_freed_memory()
    file = RunFolder(run_dir).require().path / "recommendations.csv" if out is None else Path(out)
    screen = Screen(file.is_file() or not file.exists())  # /dev/stdout gets the table alone
    with whole(file) as unfinished:  # before the work: it may be that nothing can be written
        made = _prepare(run_dir, users, mask_history)
        rows = 0
        for part in _parts(made, k, screen):
            part.to_csv(unfinished, header=not rows, index=False)
            rows += len(part)
    if users is not None and rows <= _FEW:
        screen.line(part.to_string(index=False))
    screen.line(f"{rows:,} recommendations of {made.config['model']}")
    screen.line(str(file))
    return file


def _prepare(
    run_dir: str | Path, users: Sequence[str] | None, mask_history: bool | None
) -> Experiment:
    """The trained model and a row for every user, in the order asked for."""
    ids: np.ndarray | None = None

    def next_events(dataset: Kind) -> Kind:
        nonlocal ids
        ids = None if users is None else _ids(dataset, users)
        return dataset.with_next(ids)

    made = load(run_dir, next_events)
    if ids is not None:
        made.loaders["test"].rows = np.searchsorted(np.sort(ids), ids)  # rows are by user id
    if mask_history is not None:
        made.config["mask_history"] = mask_history
    return made


def _ids(dataset: Dataset, users: Sequence[str]) -> np.ndarray:
    """Ids of users by name, each once."""
    users = list(dict.fromkeys([users] if isinstance(users, str) else map(str, users)))
    known = dataset.field2token_id[dataset.uid_field]
    ids = np.array([known.get(user, 0) for user in users], dtype=np.int64)
    missing = [user for user, n in zip(users, dataset.log.lengths[ids], strict=True) if not n]
    if missing or not users:
        shown = ", ".join(map(repr, missing[:5])) + (", ..." if len(missing) > 5 else "")
        raise UsageError(
            f"users: {len(missing)} of {len(users)} have no event in {dataset.dataset_name!r}"
            f"{': ' if missing else ''}{shown}"
        )
    return ids


def _parts(made: Experiment, k: int, screen: Screen | None = None) -> Iterator[pd.DataFrame]:
    """Recommendations, a batch of users at a time."""
    dataset, loader = made.dataset, made.loaders["test"]
    if not (is_whole(k) and 1 <= k < dataset.item_num):
        raise UsageError(
            f"k: expected 1 to {dataset.item_num - 1}, the number of items, found {k!r}"
        )
    user_field, item_field = dataset.uid_field, dataset.iid_field
    user_names, item_names = (dataset.field2id_token[f] for f in (user_field, item_field))
    batches = screen.batches(loader, "recommending") if screen else None
    for rows, scores in made.trainer.scores(loader, batches):
        best, items = (x.cpu().numpy() for x in scores.topk(k))
        row, rank = np.nonzero(best > -np.inf)  # all but a few items may be left out
        yield pd.DataFrame(
            {
                user_field: user_names[rows[user_field].cpu().numpy()[row]],
                "rank": rank + 1,
                item_field: item_names[items[row, rank]],
                "score": best[row, rank],
            }
        )
