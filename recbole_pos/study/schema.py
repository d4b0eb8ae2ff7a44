"""Layouts of the files of a study and a packed study, which are validated before they are used.

Files may come from others, and a wrong value must not reach a table. JSON is parsed by pydantic,
which bounds its depth and refuses text that is not Unicode.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from recbole_pos.errors import UsageError
from recbole_pos.values import short, shown

MOST_BYTES = 2**24  # largest file of json or of validation by epoch, in bytes
Digest = Annotated[str, Field(pattern=r"^\w{1,64}$")]  # a folder name that cannot leave its parent
_Name = Annotated[str, Field(max_length=10_000)]
_Count = Annotated[int, Field(ge=0, lt=2**64)]
_Trial = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
_Metrics = dict[Annotated[str, Field(pattern=r"^(gauc|[a-z0-9_]+@[1-9][0-9]{0,8})$")], float]
_Options = dict[_Name, JsonValue]


class Layout(BaseModel):
    """Layout of a mapping: types are strict, numbers finite, and further keys are kept."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")


class Device(Layout):
    """The device of a run."""

    name: _Name
    threads: _Count
    precision: _Name
    processor: _Name | None = None


class RunFacts(Layout):
    """``fit.json`` and ``result.json``: the fit, status and results of a run."""

    status: _Name = ""
    reason: str = ""
    known_from: _Name = ""
    row: _Name = ""
    seed: _Count = 0
    stage: _Name = ""
    trial: _Count | None = None
    commit: _Name = ""
    model: _Name = ""
    searched: _Options | None = None
    digest: Digest = ""
    dataset: _Name = ""
    best_valid: _Metrics | None = None
    test: _Metrics | None = None
    epochs: _Count | None = None
    best_epoch: _Count | None = None
    seconds: dict[_Name, Annotated[float, Field(ge=0)]] | None = None
    targets_per_second: float | None = None
    parameters: _Count | None = None
    candidates: _Name = ""
    valid_targets: _Count = 0
    test_targets: _Count = 0
    peak_rss_mb: float | None = None
    versions: dict[_Name, _Name] | None = None
    device: Device | Annotated[dict[str, JsonValue], Field(max_length=0)] | None = None


class Epoch(Layout):
    """A line of ``metrics.jsonl``."""

    epoch: _Count
    valid: _Metrics | None = None


class Drawn(Layout):
    """``searches/*.json``: samples of a search by trial; since 0.2 with a digest of its space."""

    space: _Name | None = None
    drawn: dict[_Trial, _Options] | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_0_1(cls, content: Any) -> Any:
        """Return the content of a file of 0.1, which has samples only, in the present layout."""
        plain = isinstance(content, dict) and not {"space", "drawn"} & set(content)
        return {"drawn": content} if plain and content else content


class DrawnByRow(Layout):
    """``searches.json`` of a packed study."""

    __pydantic_extra__: dict[str, Drawn]


class Ties(Layout):
    """How many held-out items depend on the order of interactions at one time."""

    users: _Count
    test: _Count
    valid: _Count
    expected: float


class Facts(Layout):
    """``facts.json``: facts of the data, and the choices of the searches."""

    versions: dict[_Name, _Name] = {}
    data: dict[_Name, _Count | _Name] = {}
    ties: Ties | None = None
    chosen: dict[_Name, _Count | None] | None = None
    chosen_by: dict[_Name, _Name] | None = None
    unmade: dict[_Name, str] = {}
    warnings: list[_Name] = []


class Noted(Layout):
    """The digest of the run of a fit, and the digest of what the plan asked of it."""

    run: Digest
    asked: _Name


class Current(Layout):
    """``current.json``: fit -> its run; in 0.1 without the digest of what was asked."""

    __pydantic_extra__: dict[str, Noted | Digest]


class Kept(Layout):
    """``study.json``: the name and content of the study's file."""

    name: _Name
    content: _Options
    storage: _Name | None = None


def parse(layout: type[Layout], content: bytes | str, name: str) -> dict[str, Any]:
    """Return the content of a json text, checked, without keys that it does not set.

    Args:
        layout: expected layout.
        content: the text.
        name: name of the file, for messages.

    Raises:
        UsageError: naming file and field, if the text is not json or has another layout.
    """
    try:
        return layout.model_validate_json(content).model_dump(exclude_unset=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"] if part != "[key]")
        found = "" if first["type"] == "json_invalid" else f", found {shown(first['input'])}"
        place = f"{short(field)}: " if field else ""
        raise UsageError(f"{short(name)}: {place}{first['msg']}{found}") from error


def read(layout: type[Layout], file: Path, advice: str) -> dict[str, Any]:
    """Return the content of a json file, checked; empty if there is no file.

    Args:
        layout: expected layout.
        file: path of the file.
        advice: what to do if it is damaged, for the message.

    Raises:
        UsageError: as :func:`parse`, and for a file that cannot be read.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UsageError(f"cannot read {short(str(file))}: {error.strerror}") from error
    if len(content) > MOST_BYTES:
        raise UsageError(f"{file}: more than {MOST_BYTES >> 20} MiB, expected less; {advice}")
    try:
        return parse(layout, content, str(file))
    except UsageError as error:
        raise UsageError(f"{error}; {advice}") from error


def epochs(content: bytes, name: str) -> list[dict[str, Any]]:
    """Return the epochs in a ``metrics.jsonl``, checked line by line.

    Raises:
        UsageError: as :func:`parse`.
    """
    lines = enumerate(content.splitlines(), 1)
    return [parse(Epoch, line, f"{name}, line {number}") for number, line in lines]


_NPY = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([|<>][iu][1248])', 'fortran_order': False, "
    rb"'shape': \((\d{1,12}),\), \} *\n",
    re.DOTALL,
)


def array(content: bytes | memoryview, name: str) -> np.ndarray:
    """Return the whole numbers of a npy file, a view of its content without a copy.

    Raises:
        UsageError: naming the file, if it is not one array [n] of whole numbers from 0.
    """
    header = _NPY.match(content[:256])
    if header is not None:
        dtype, size = np.dtype(header[1].decode()), int(header[2])
        if size * dtype.itemsize == len(content) - header.end():
            found = np.frombuffer(content, dtype, offset=header.end())
            if found.min(initial=0) >= 0:
                return found
    raise UsageError(f"{name}: expected one array of ranks, whole numbers from 0")
