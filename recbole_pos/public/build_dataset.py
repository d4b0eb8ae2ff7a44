"""Make a public dataset from the raw files that its source publishes: ``recbole-pos data build``.

The raw files, which the user has downloaded, are read by a recipe (``datasets.py``), converted to
RecBole's atomic files (``.inter``, ``.item``, ``.user``), and counted against published numbers.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.conversion.convert import convert
from recbole_pos.conversion.writing import list_dataset_files
from recbole_pos.data.identity import count_dataset, require_counts
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import read_dataset
from recbole_pos.public.datasets import RECIPES, PublicDataset, Tables, find_public_dataset
from recbole_pos.reporter import Reporter


def build(
    name: str,
    files: Sequence[str | Path],
    data_path: str | Path = "dataset/",
    overwrite: bool = False,
    verbose: bool = True,
) -> Path:
    """Make a public dataset from its raw files; the same files give the same bytes.

    A recipe reads the raw files as tables, these are written as RecBole's atomic files (text files
    with a typed header), and the numbers of users, items and interactions are compared with
    the published ones.

    Args:
        name: name of the public dataset.
        files: its raw files, in the order of ``PublicDataset.files``.
        data_path: folder in which the folder of the dataset is made.
        overwrite: whether to replace a dataset that is there.
        verbose: whether to print progress and counts.

    Returns:
        Folder of the dataset.

    Raises:
        UsageError: if a file is missing or cannot be read, or counts are not those published.
    """
    public = find_public_dataset(name)
    reporter = Reporter(verbose)
    folder = Path(data_path) / name
    paths = [Path(file) for file in files]
    if list_dataset_files(folder, name) and not overwrite:
        raise UsageError(f"data: {folder} holds a dataset already; --overwrite replaces it")

    # Read the raw files and write the dataset. Its yaml file of options comes with this package,
    # and replaces the one that ``convert`` writes.
    tables = _read_raw(public, paths, reporter)
    _write_atomic(name, tables, data_path, overwrite)
    shutil.copyfile(public.yaml, folder / public.yaml.name)

    # Read the new dataset as a run would, to count it; the model does not matter.
    dataset = read_dataset(PosConfig("Pop", name, None, {"data_path": str(data_path)}))
    counts = count_dataset(dataset).items()
    reporter.line(f"{folder}: " + ", ".join(f"{count:,} {unit}" for unit, count in counts))
    require_counts(name, public.counts, dataset)
    return folder


def _write_atomic(name: str, tables: Tables, data_path: str | Path, overwrite: bool) -> None:
    """Write the tables of a public dataset as RecBole's atomic files.

    Args:
        name: name of the dataset.
        tables: its interactions, items and users. The first three columns of interactions are user,
            item and time; ``kinds`` has the types of columns in atomic files, such as token.
        data_path: folder in which the folder of the dataset is made.
        overwrite: whether to replace a dataset that is there.
    """
    # Some editions of a dataset lack the values of a column: it is empty, or has only 0 or empty
    # lists or texts. Such a column gets no type here, and ``convert`` leaves it out.
    filled = set()
    for table in (tables.interactions, tables.items, tables.users):
        if table is not None:
            filled |= {column for column in table if table[column].dropna().map(bool).any()}
    types = {column: kind for column, kind in tables.kinds.items() if column in filled}

    user, item, time, *further = tables.interactions.columns
    convert(
        tables.interactions,
        name=name,
        items=tables.items,
        users=tables.users,
        user=user,
        item=item,
        time=time,
        date_format="s",  # seconds since 1970
        types=types,
        rename={user: user},  # keep a name such as session_id, which convert would change
        tables=dict.fromkeys(further, "inter"),  # keep columns such as a rating in interactions
        max_lost=1,  # any share of the rows may be unusable, since the caller checks the counts
        data_path=data_path,
        overwrite=overwrite,
        verbose=False,
    )


def _read_raw(public: PublicDataset, files: list[Path], reporter: Reporter) -> Tables:
    """Read the raw files of a dataset by its recipe, the function that knows their format.

    Args:
        public: the dataset.
        files: paths of its raw files, in the order of ``public.files``.
        reporter: where to report progress.

    Returns:
        Frames of interactions and, where the dataset has them, of items and users.

    Raises:
        UsageError: if the number of files is wrong, or one of them cannot be read.
    """
    expected = " ".join(public.files)
    if len(files) != len(public.files):
        raise UsageError(
            f"data: {public.name} is built from {expected} ({public.source}), found {len(files)} "
            f"files: recbole-pos data build {public.name} {expected}"
        )
    names = ", ".join(file.name for file in files)
    with reporter.task(f"reading {names}"):
        try:
            # ``RECIPES`` has these functions by name
            return RECIPES[public.recipe](*files)
        except Exception as error:  # a damaged, wrong or missing file may raise any kind
            raise UsageError(
                f"data: {names} cannot be read as {expected} of {public.source}: "
                f"{type(error).__name__} {str(error)[:200]}"
            ) from error
