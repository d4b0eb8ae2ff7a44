"""Arguments of a run, a search and other commands beside their configuration: one field each.

The command line is made of these fields (``cli/parser.py``), and :func:`recbole_pos.run` and
:func:`recbole_pos.search` take them by name, so that a default stands once.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from recbole_pos.errors import UsageError
from recbole_pos.values import is_number, is_whole, shown

_SMALLEST = 1e-4  # share of a CPU or a GPU that Ray can count


def _flag(default: Any, text: str, metavar: str | None = None, **extra: Any) -> Any:
    """Return a dataclass field that also describes its option on the command line."""
    # ``text`` and ``metavar`` (of the value) stand in --help. ``extra``: ``flag``, the name of the
    # option where it is not that of the field; ``group``, a set of options of which one can be
    # given; ``kind``, the type of the value where the annotation does not say it
    return field(default=default, metadata={"text": text, "metavar": metavar, **extra})


def find_kind(argument: Field) -> type:
    """Return the type of an argument's value by the annotation of its field; list for several."""
    if kind := argument.metadata.get("kind"):
        return kind
    kinds = {"bool": bool, "int": int, "float": float, "tuple": list}
    return next((kinds[name] for name in kinds if str(argument.type).startswith(name)), str)


@dataclass(frozen=True)
class Reporting:
    """What is reported while a model trains."""

    verbose: bool = _flag(True, "print nothing", flag="quiet", group="reporting")
    as_json: bool = _flag(
        False,
        "print json objects, one a line: start, epoch (each), result",
        flag="json",
        group="reporting",
    )
    log: str | Path | None = _flag(None, "add what is printed to this file too", "FILE")


@dataclass(frozen=True)
class AttachArguments(Reporting):
    """Arguments of :func:`recbole_pos.attach`."""

    run_dir: str | Path | None = _flag(None, "output folder (saved/<dataset>/<model>/<time>)")


@dataclass(frozen=True)
class RunArguments(AttachArguments):
    """Arguments of :func:`recbole_pos.run`.

    Several processes train together where ``world_size`` is above 1, as RecBole has them.
    """

    resume: str | Path | None = _flag(None, "continue an interrupted run", "RUN_DIR")
    nproc: int = _flag(1, "processes here (1)", "N")
    world_size: int = _flag(-1, "processes on all machines together", "N")
    ip: str = _flag("localhost", "address of the machine that runs process 0")
    port: int | str | None = _flag(None, "where they meet (a free one; 5678 between machines)")
    group_offset: int = _flag(0, "number of the first process here", "N")
    max_restarts: int = _flag(3, "restarts from the last epoch when a process is lost (3)", "N")
    join_timeout: float = _flag(60, "seconds to wait for processes that are missing (60)", "S")


@dataclass(frozen=True)
class ClusterArguments:
    """Where the trainings of a search or of a study run."""

    max_concurrent: int | None = _flag(None, "trainings side by side (as many as fit)", "N")
    address: str | None = _flag(None, "Ray cluster: auto or HOST:PORT (one of its own)")

    cpus_per_trial: float = _flag(1, "cores of a training (1)", "N")
    gpus_per_trial: float = _flag(0, "GPUs of a training; 0.5 shares one (0)", "N")
    verbose: bool = _flag(True, "print nothing", flag="quiet")


def require_shares(max_concurrent: int | None, cpus: float, gpus: float) -> None:
    """Refuse resources of trainings that Ray cannot provide.

    Args:
        max_concurrent: number of trainings side by side; None for as many as fit.
        cpus, gpus: number of CPUs and GPUs of a training; fractions share one.

    Raises:
        UsageError: naming the option.
    """
    if not (max_concurrent is None or is_whole(max_concurrent) and max_concurrent >= 1):
        raise UsageError(f"--max_concurrent: expected 1 or more, found {shown(max_concurrent)}")
    if not (is_number(cpus) and cpus >= _SMALLEST):
        raise UsageError(f"--cpus_per_trial: expected more than 0, found {shown(cpus)}")
    if not (is_number(gpus) and (gpus == 0 or _SMALLEST <= gpus <= 1 or gpus == int(gpus) > 0)):
        raise UsageError(
            f"--gpus_per_trial: expected a fraction or a whole number, found {shown(gpus)}"
        )


@dataclass(frozen=True)
class CompareArguments(ClusterArguments):
    """Arguments of :func:`recbole_pos.compare`."""

    vary: tuple[str, ...] = _flag(
        (), "a configuration per value, such as 'position=[nope],[rope,kernel]'", "OPTION=A,B"
    )
    seeds: int | None = _flag(None, "seeds per configuration (1, or as the study says)", "N")
    reference: str | None = _flag(None, "configuration to compare with (the first)")
    rows: tuple[str, ...] = _flag((), "train only these configurations; all are shown", "NAME")
    run_dir: str | Path | None = _flag(None, "the study's folder (saved/<dataset>/studies/<title>)")
    dry_run: bool = _flag(False, "list what would be trained, and train nothing")
    report: bool = _flag(False, "tables and report of what is finished, and train nothing")
    known: tuple[str | Path, ...] = _flag((), "runs of --pack that are not trained again", "FILE")
    pack: str | Path | None = _flag(None, "write what is finished into one file", "FILE")


@dataclass(frozen=True)
class SearchArguments(ClusterArguments):
    """Arguments of :func:`recbole_pos.search`."""

    num_samples: int | None = _flag(None, "trials (60; all of a grid)", "N")
    metric: str | None = _flag(None, "validation metric to go by (valid_metric), such as ndcg@10")
    scheduler: Any = _flag("asha", "asha (stops weak trials early) or none")
    grace_epochs: int = _flag(5, "epochs of each trial before asha may stop it (5)", "N")
    searcher: str = _flag("optuna", "optuna (TPE), random or grid")
    seed: int = _flag(0, "of the search (0); that of training is `seed` in a configuration file")
    run_dir: str | Path | None = _flag(None, "output folder (saved/<dataset>/<model>/tune-<time>)")
    resume: str | Path | None = _flag(
        None, "continue a search; with --num_samples, extend it", "DIR"
    )


@dataclass(frozen=True)
class ConvertArguments:
    """Arguments of :func:`recbole_pos.convert`."""

    name: str | None = _flag(None, "of the dataset (that of the file)")
    # these four: files or, in Python, frames
    items: Any = _flag(None, "file with attributes of items", "FILE")
    users: Any = _flag(None, "file with attributes of users", "FILE")
    valid: Any = _flag(None, "interactions to validate with; needs --test", "FILE")
    test: Any = _flag(None, "interactions to test with, which no split chooses", "FILE")
    user: str | None = _flag(None, "column of who (by name)", "COLUMN")
    item: str | None = _flag(None, "column of what (by name)", "COLUMN")
    time: str | None = _flag(
        None,
        "column of when (by name and what it holds), or row_order: no such column, and the rows of "
        "a user are in order",
        "COLUMN",
    )
    date_format: str | None = _flag(
        None, "how times are written: s, ms, us, ns or '%%d/%%m/%%Y %%H:%%M'", "FORM"
    )
    columns: Any = _flag(
        (), "names of the columns of a text file without a header, in order", "NAME,NAME"
    )
    item_columns: Any = _flag((), "the same of --items", "NAME,NAME")
    user_columns: Any = _flag((), "the same of --users", "NAME,NAME")
    types: Any = _flag(
        (), "token, token_seq, float or float_seq (guessed)", "COLUMN=TYPE", kind=list, flag="type"
    )
    tables: Any = _flag(
        (),
        "item, user or inter, where a column goes (seen)",
        "COLUMN=TABLE",
        kind=list,
        flag="table",
    )
    decimal: Any = _flag((), "decimal separator of numbers (seen)", "COLUMN=MARK", kind=list)
    thousands: Any = _flag((), "thousands separator of numbers (seen)", "COLUMN=MARK", kind=list)
    rename: Any = _flag((), "names of fields", "COLUMN=FIELD", kind=list)
    drop: tuple[str, ...] = _flag((), "columns to leave out", "COLUMN")
    rm_copies: bool = _flag(
        False, "leave out exact copies: the same user, item and time as an earlier line"
    )
    min_user: int = _flag(1, "leave out users with fewer interactions (1)", "N")
    min_item: int = _flag(1, "leave out items with fewer interactions (1)", "N")
    core: int = _flag(1, "both, until all have so many (1)", "N")
    separator: str | None = _flag(None, "between cells of a text file (seen)")
    no_quotes: bool = _flag(False, "quotation marks mean nothing in a text file")
    encoding: str = _flag("utf-8", "of text files (utf-8)")
    data_path: str | Path = _flag("dataset/", "folder that gets the dataset (dataset/)")
    overwrite: bool = _flag(False, "replace a dataset of this name")
    dry_run: bool = _flag(False, "show what would be written, and write nothing")
    verbose: bool = _flag(True, "print nothing", flag="quiet")


@dataclass(frozen=True)
class ServeArguments:
    """Arguments of :func:`recbole_pos.serve.http.serve`; the limits are those of a request."""

    host: str = _flag("127.0.0.1", "address to listen on (127.0.0.1: this machine alone)")
    port: int = _flag(8080, "port to listen on (8080); 0 takes a free one")
    threads: int = _flag(1, "threads that compute (1)", "N")
    max_body: int = _flag(2**20, "bytes (1048576)", "N")
    max_histories: int = _flag(256, "histories, users, or items with neighbours (256)", "N")
    max_items: int = _flag(10000, "items of a history (10000)", "N")
    max_k: int = _flag(1000, "recommendations of a history (1000)", "N")
    max_left_out: int = _flag(2000, "interactions left out to explain (2000)", "N")
    max_waiting: int = _flag(256, "requests that wait; further ones get 503 (256)", "N")
    allow_reload: bool = _flag(False, "let other machines POST /reload, too")
    shares: tuple[str, ...] = _flag(
        (), "of several models, the parts of all ids that each answers", "NAME=PART"
    )
    data_path: str | None = _flag(None, "folder of datasets (where the run found its own)", "DIR")
    item_vectors: str | None = _flag(
        None, "content vectors of further items, read again by /reload", "FILE"
    )


Settings = TypeVar(
    "Settings", bound=Reporting | ClusterArguments | ConvertArguments | ServeArguments
)


def split_keywords(default: Settings, keywords: dict[str, Any]) -> tuple[Settings, dict[str, Any]]:
    """Divide the keywords of a call.

    Returns:
        ``default`` with the keywords that are its fields, and the others, which are options of the
        configuration.
    """
    options = dict(keywords)
    own = {
        field.name: options.pop(field.name) for field in fields(default) if field.name in options
    }
    return replace(default, **own), options


def changed_settings(settings: Any) -> dict[str, Any]:
    """Return the fields of a settings object that differ from their defaults."""
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return {f.name: values[f.name] for f in fields(settings) if values[f.name] != f.default}
