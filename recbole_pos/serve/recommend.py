"""What a trained model recommends, to all users, to some, or to histories, as a table or a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from recbole_pos.data.grown import Growth
from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.memory import keep_freed_memory
from recbole_pos.files import whole
from recbole_pos.screen import Screen
from recbole_pos.serve.histories import lines_of
from recbole_pos.serve.recommender import MODEL, Recommender

_FEW = 30  # recommendations that are shown, too


def recommend(
    run_dir: str | Path,
    users: Sequence[str] | None = None,
    k: int = 10,
    mask_history: bool | None = None,
) -> pd.DataFrame:
    """The k items with the highest scores after everything a user has done, best first.

    Histories are whole: what was held out from training is read too, and so is what the data have
    beyond what the model was trained on. ``Recommender`` can do more.

    >>> found = recbole_pos.recommend("mine", users=["196", "22"], k=5)
    >>> list(found), len(found)
    (['user_id', 'rank', 'item_id', 'score', 'by'], 10)

    Args:
        run_dir: the folder of a run, finished or not; its best weights are used.
        users: names of users (of sessions, where these are the users), each taken once; all with
            an event if None.
        k: items a user. Where fewer are left to recommend, there are fewer rows.
        mask_history: whether items of a user's past are left out; None for what the run was
            evaluated with.

    Returns:
        A row per recommendation, users in the order given (or of the data) and items best first:
        the user field, ``rank`` from 1, the item field, ``score``, and ``by``: model, or popularity
        for users of whom the model knows nothing.

    Raises:
        UsageError: for users without an event, or a k that is more than there are items.
        CheckpointError: if the data the model was trained on are not there any more.
    """
    trained = Recommender.load(run_dir)
    return _named(trained.recommend(users, k=k, exclude_seen=mask_history), trained)


def write_recommendations(
    run_dir: str | Path,
    users: Sequence[str] | None = None,
    k: int = 10,
    exclude_seen: bool | None = None,
    items: str | Path | None = None,
    exclude: str | Path | None = None,
    histories: str | Path | None = None,
    out: str | Path | None = None,
) -> Path:
    """As above, into a file, part by part, so that memory does not grow with users.

    Args:
        run_dir, users, k: as above.
        exclude_seen: whether items of a user's past are left out; None for what the run was
            evaluated with.
        items: a file of names, one a line, of the items to choose from.
        exclude: such a file of items to leave out.
        histories: a file of json lines, ``{"id": ..., "items": [...], "times": [...]}``, instead of
            the users of the data.
        out: a csv file, or parquet if it ends so; ``recommendations.csv`` in the run folder when
            None. A pipe or ``/dev/stdout`` is written to as it is.

    Raises:
        StorageError: if the file cannot be written; one that was there is as it was.
    """
    keep_freed_memory()
    file = RunFolder(run_dir).require().path / "recommendations.csv" if out is None else Path(out)
    screen = Screen(file.is_file() or not file.exists())  # /dev/stdout gets the table alone
    with _writer(file) as write:  # before the work: it may be that nothing can be written
        names = (
            None if items is None else _names(items),
            None if exclude is None else _names(exclude),
        )
        trained = Recommender.load(run_dir)
        _tell_growth(trained.growth, screen)
        if trained.changed:
            screen.line(f"since training: values of {', '.join(trained.changed)} have changed")
        choice = trained.choice(*names)
        if histories is not None and users is not None:
            raise UsageError("give users or histories, not both")
        asked = trained.of_users(users) if histories is None else trained.read(lines_of(histories))
        rows = seen = 0
        popular: set[Any] = set()
        with screen.task("recommending", len(asked)) as task:
            for part, again in trained.parts(asked, k, exclude_seen, choice):
                table = part.astype({"id": str}) if histories is not None else _named(part, trained)
                write(table)
                rows, seen = rows + len(part), seen + again
                popular |= set(part["id"][part["by"] != MODEL])
                task.advance(part["id"].nunique())
    if rows <= _FEW and (users is not None or histories is not None):
        screen.line(table.to_string(index=False))
    screen.line(f"{rows:,} recommendations of {trained.config['model']}")
    if unknown := int(asked.unknown.sum()):
        screen.line(f"{unknown:,} items of histories are not known to the model: left out")
    if popular:
        screen.line(
            f"{len(popular):,} of {len(asked):,} get the most popular items: nothing in their "
            "history is known to the model"
        )
    if seen and not exclude_seen:
        screen.line(
            f"{seen / rows:.0%} of them are in the history already; --exclude_seen leaves these out"
        )
    screen.line(str(file))
    return file


def _named(found: pd.DataFrame, trained: Recommender) -> pd.DataFrame:
    """With the names that the fields have in the data."""
    dataset = trained.dataset
    return found.rename(columns={"id": dataset.uid_field, "item": dataset.iid_field})


def _tell_growth(growth: Growth, screen: Screen) -> None:
    if growth.users or growth.events:
        screen.line(
            f"since training: {growth.events:,} events, {growth.users:,} users are new; all of "
            "them are read"
        )
    if growth.items:
        screen.line(
            f"since training: {growth.items:,} new items, which the model does not know; "
            f"{growth.skipped:,} events of them are skipped (`recbole-pos update` learns them)"
        )


def _names(file: str | Path) -> list[str]:
    """Names of a file, one a line."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    return [line.strip() for line in lines if line.strip()]


@contextmanager
def _writer(file: Path) -> Iterator[Callable[[pd.DataFrame], None]]:
    """What appends a table to a csv or parquet file, whole at the end."""
    parquet = file.suffix == ".parquet"
    with whole(file, text=not parquet) as unfinished, ExitStack() as opened:
        writer: pq.ParquetWriter | None = None
        begun = False

        def write(table: pd.DataFrame) -> None:
            nonlocal writer, begun
            if not parquet:
                table.to_csv(unfinished, header=not begun, index=False)
                begun = True
                return
            columns = pa.Table.from_pandas(table, preserve_index=False)
            if writer is None:
                writer = opened.enter_context(pq.ParquetWriter(unfinished, columns.schema))
            writer.write_table(columns.cast(writer.schema))

        yield write
