"""Arguments of a run, a search and other commands beside their configuration: one field each.

The command line is made of these fields (``cli/parser.py``), and :func:`recbole_pos.run` and
:func:`recbole_pos.tune` take them by name, so that a default stands once.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from recbole_pos.values import to_python


def _arg(default: Any, text: str, metavar: str | None = None, **extra: Any) -> Any:
    """Return a dataclass field that describes one argument of a command.

    The command line is made from these fields: ``_arg(1, "processes (1)", "N")`` in a field
    ``nproc`` becomes the argument ``--nproc N`` with the default 1.

    Args:
        default: its default.
        text: its line of ``--help``.
        metavar: what ``--help`` calls its value.
        extra: ``flag``, another name of it on the command line; ``group``, name of a set of
            arguments of which only one can be given.
    """
    return field(default=default, metadata={"text": text, "metavar": metavar, **extra})


def find_kind(argument: Field) -> type:
    """Return the type of an argument's value, for the command line; ``list`` if it takes several.

    The annotation of the field is read as text, and the type with which it begins is taken: ``int |
    None`` gives int, and ``tuple[str, ...]`` list. Any other annotation gives str.

    Args:
        argument: a dataclass field that :func:`_arg` made.
    """
    for name, kind in (("bool", bool), ("int", int), ("float", float), ("tuple", list)):
        if str(argument.type).startswith(name):
            return kind
    return str


@dataclass(frozen=True)
class AttachArguments:
    """Arguments of :func:`recbole_pos.attach`; the texts below are those of ``--help``."""

    verbose: bool = _arg(True, "print no progress and no results", flag="quiet")
    run_dir: str | Path | None = _arg(None, "output folder (saved/<dataset>/<model>/<time>)")


@dataclass(frozen=True)
class RunArguments(AttachArguments):
    """Arguments of :func:`recbole_pos.run`."""

    resume: str | Path | None = _arg(None, "continue an interrupted run", "RUN_DIR")
    nproc: int = _arg(1, "processes that train together (1)", "N")
    max_restarts: int = _arg(3, "restarts from the last epoch when one is killed (3)", "N")


@dataclass(frozen=True)
class ClusterArguments:
    """Where the trainings of a search or of a study run, and how many side by side."""

    max_concurrent: int | None = _arg(None, "trainings side by side (as many as fit)", "N")
    address: str | None = _arg(None, "Ray cluster: auto or HOST:PORT (this machine)")
    cpus_per_trial: float = _arg(1, "cores of a training (1)", "N")
    gpus_per_trial: float | None = _arg(None, "GPUs of a training; 0.5 shares one (1 if any)", "N")
    verbose: bool = _arg(True, "print no progress and no results", flag="quiet")


@dataclass(frozen=True)
class CompareArguments(ClusterArguments):
    """Arguments of :func:`recbole_pos.compare`."""

    vary: tuple[str, ...] = _arg((), "a configuration per value: position=[nope],[rope]", "KEY=A,B")
    seeds: int | None = _arg(None, "seeds per configuration (1, or as the study says)", "N")
    reference: str | None = _arg(None, "configuration to compare with (the first)")
    rows: tuple[str, ...] = _arg((), "train only these configurations; all are shown", "NAME")
    run_dir: str | Path | None = _arg(None, "the study's folder (saved/<dataset>/studies/<title>)")
    dry_run: bool = _arg(False, "list what would be trained, and train nothing")
    report: bool = _arg(False, "tables and report of what is finished, and train nothing")
    latex: bool = _arg(False, "also write table.tex, and the figures as pdf")
    plan: bool = _arg(False, "only tell which difference how many seeds would detect")
    difference: float | None = _arg(None, "with --plan: how many seeds it takes", "NUMBER")
    known: tuple[str | Path, ...] = _arg((), "runs of --pack that are not trained again", "FOLDER")
    pack: str | Path | None = _arg(None, "write what is finished into a folder, to keep", "FOLDER")


@dataclass(frozen=True)
class SearchArguments(ClusterArguments):
    """Arguments of :func:`recbole_pos.tune`."""

    num_samples: int | None = _arg(None, "trials (60; all of a grid)", "N")
    metric: str | None = _arg(None, "validation metric to go by (valid_metric), such as ndcg@10")
    scheduler: str = _arg("asha", "asha (stops weak trials early) or none")
    grace_epochs: int = _arg(5, "epochs of each trial before asha may stop it (5)", "N")
    searcher: str = _arg("optuna", "optuna (TPE), random or grid")
    seed: int = _arg(0, "of the search (0); that of training is `seed` in a configuration file")
    run_dir: str | Path | None = _arg(None, "output folder (saved/<dataset>/<model>/tune-<time>)")
    resume: str | Path | None = _arg(None, "continue a search; extend it by --num_samples", "DIR")


@dataclass(frozen=True)
class ConvertArguments:
    """Arguments of :func:`recbole_pos.convert`."""

    name: str | None = _arg(None, "of the dataset (that of the file)")
    # these four: files or, in Python, frames
    items: Any = _arg(None, "file with attributes of items", "FILE")
    users: Any = _arg(None, "file with attributes of users", "FILE")
    valid: Any = _arg(None, "interactions to validate with; needs --test", "FILE")
    test: Any = _arg(None, "interactions to test with, which no split chooses", "FILE")
    user: str | None = _arg(None, "column of who (by name)", "COLUMN")
    item: str | None = _arg(None, "column of what (by name)", "COLUMN")
    time: str | None = _arg(None, "column of when (by name); row_order: rows in order", "COLUMN")
    date_format: str | None = _arg(None, "of times: s, ms, us, ns or '%%d/%%m/%%Y %%H:%%M'", "FORM")
    timezone: str | None = _arg(None, "of times that name none (UTC), as America/New_York", "ZONE")
    then: str | None = _arg(None, "column that orders rows of the same time", "COLUMN")
    columns: Any = _arg((), "names of the columns of a text file without a header", "NAME,NAME")
    types: tuple | dict = _arg((), "token, token_seq, float, float_seq", "COLUMN=TYPE", flag="type")
    tables: tuple | dict = _arg((), "table: item, user or inter", "COLUMN=TABLE", flag="table")
    rename: tuple | dict = _arg((), "names of fields", "COLUMN=FIELD")
    drop: tuple[str, ...] = _arg((), "columns to leave out", "COLUMN")
    max_lost: float = _arg(0.1, "share of the rows of a table that may be unusable (0.1)", "SHARE")
    separator: str | None = _arg(None, "between cells of a text file (seen)")
    no_quotes: bool = _arg(False, "quotation marks mean nothing in a text file")
    encoding: str = _arg("utf-8", "of text files (utf-8)")
    decimal: str = _arg(".", "decimal separator of numbers in text (.)")
    missing: tuple[str, ...] = _arg((), "words for a missing cell beside NA, null etc.", "WORD")
    data_path: str | Path = _arg("dataset/", "folder that gets the dataset (dataset/)")
    overwrite: bool = _arg(False, "replace a dataset of this name")
    dry_run: bool = _arg(False, "show what would be written, and write nothing")
    verbose: bool = _arg(True, "print no progress and no results", flag="quiet")


@dataclass(frozen=True)
class IndexArguments:
    """Whether recommendations are found by an approximate index of the items."""

    index: str | None = _arg(
        None, "faiss: find items by an approximate index, for a million items (score all)", "NAME"
    )
    index_recall: float = _arg(
        0.99, "share of the best items that the index must find (0.99)", "SHARE"
    )


@dataclass(frozen=True)
class PartArguments:
    """How :func:`recbole_pos.serve.parts.recommend_in_parts` writes its parts."""

    part_rows: int | None = _arg(None, "write a folder (--out) of resumable parts of N users", "N")
    workers: int = _arg(1, "processes on this machine that write parts (1)", "N", group="where")
    part: str | None = _arg(None, "write the I-th of N shares of the parts", "I/N", group="where")


@dataclass(frozen=True)
class ServeArguments(IndexArguments):
    """Arguments of :func:`recbole_pos.serve.http.serve`."""

    host: str = _arg("127.0.0.1", "address to listen on (127.0.0.1: this machine alone)")
    port: int = _arg(8080, "port to listen on (8080); 0 takes a free one")
    threads: int = _arg(1, "threads that compute (1)", "N")
    data_path: str | None = _arg(None, "folder of datasets (where the run found its own)", "DIR")
    item_vectors: str | None = _arg(None, "content vectors of further items", "FILE")
    histories_only: bool = _arg(False, "answer given histories only; reads no dataset if possible")


Settings = TypeVar("Settings", bound=Any)  # one of the dataclasses above


def split_keywords(default: Settings, keywords: dict[str, Any]) -> tuple[Settings, dict[str, Any]]:
    """Split the keyword arguments of a call into fields of a settings object and everything else.

    Users give both in one call: ``recbole_pos.run(..., nproc=2, hidden_size=64)`` gives settings
    with ``nproc=2`` and the options ``{"hidden_size": 64}``.

    Args:
        default: a settings object, such as ``RunArguments()``.
        keywords: the keyword arguments.

    Returns:
        A copy of ``default`` with the keywords that are its fields.
        The other keywords, which are options of the configuration.
    """
    names = {field.name for field in fields(default)}
    # to_python: numbers of numpy become Python's, since settings are written as json
    settings = {name: to_python(value) for name, value in keywords.items() if name in names}
    options = {name: value for name, value in keywords.items() if name not in names}
    return replace(default, **settings), options


def list_changed(settings: Any) -> list[str]:
    """Return the names of the fields of a settings dataclass that differ from their defaults."""
    return [
        field.name for field in fields(settings) if getattr(settings, field.name) != field.default
    ]
