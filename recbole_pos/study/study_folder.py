"""The folder of a study: its plan, and every run that it has trained.

The name of a run is a digest of configuration, data, split and version of the numerics, so that a
changed option makes a new run beside the old one, and nothing is trained twice. Files may come from
others, so they are validated before a value of them reaches a table.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import RunFolder, make_folder
from recbole_pos.files import read_capped, write_json
from recbole_pos.runs import DONE, FAILED
from recbole_pos.study.configs import digest_requests
from recbole_pos.study.plan import Plan
from recbole_pos.study.results import TieCount
from recbole_pos.study.study_file import make_plan
from recbole_pos.study.study_source import Source
from recbole_pos.values import short, shown

KNOWN_FROM = "known_from"  # key of a run's facts for the packed study that it was taken from
_MAX_TITLE = 60  # most characters of a title in the path of a folder
_Digest = Annotated[str, Field(pattern=r"^\w{1,64}$")]  # a folder name that cannot leave its parent
_Metrics = dict[str, float]
_Options = dict[str, JsonValue]


class Layout(BaseModel):
    """Layout of a mapping: types are strict, numbers finite, and further keys are kept."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")


class RunFacts(Layout):
    """``fit.json``: the fit, status and results of a run."""

    status: str = ""
    reason: str = ""
    known_from: str = ""
    row: str = ""
    seed: int = 0
    trial: int | None = None
    commit: str = ""
    searched: _Options | None = None
    digest: _Digest = ""
    best_valid: _Metrics | None = None
    test: _Metrics | None = None
    epochs: int | None = None
    seconds: dict[str, float] | None = None
    parameters: int | None = None
    versions: dict[str, str] | None = None
    request_time: str = "none"
    device: _Options | None = None


class Epoch(Layout):
    """A line of ``metrics.jsonl``."""

    epoch: int
    valid: _Metrics | None = None


class StudyFacts(Layout):
    """``facts.json``: facts of the data, as in ``Results``, and the choices of the searches.

    Attributes:
        chosen: row -> trial that its search has chosen; None while trials are left.
        chosen_by: row -> metric of its search.
        unmade: name of a fit that failed before its run had a folder -> reason.
    """

    versions: dict[str, str] = {}
    data: dict[str, int | str] = {}
    warnings: list[str] = []
    split: _Options = {}
    ties: TieCount | None = None
    chosen: dict[str, int | None] = {}
    chosen_by: dict[str, str] = {}
    unmade: dict[str, str] = {}


class _CurrentRun(Layout):
    run: _Digest
    asked: str


class _Current(Layout):
    """``current.json``: fit -> digests of its run and of what the plan asked of it."""

    __pydantic_extra__: dict[str, _CurrentRun]


class _Study(Layout):
    """``study.json``: the name and content of the study's file."""

    name: str
    content: _Options


_Parsed = TypeVar("_Parsed", bound=BaseModel)


def parse(layout: type[_Parsed], content: bytes | str, name: str) -> _Parsed:
    """Return a json text as validated by ``layout``; a UsageError has ``name`` and the field."""
    try:
        return layout.model_validate_json(content)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(key) for key in details["loc"] if key != "[key]")
        prefix = f"{short(field)}: " if field else ""
        found = "" if details["type"] == "json_invalid" else f", found {shown(details['input'])}"
        raise UsageError(f"{short(name)}: {prefix}{details['msg']}{found}") from error


def read_file(file: Path) -> bytes:
    """Return the content of a file of json, empty if there is none."""
    try:
        return read_capped(file)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise UsageError(f"cannot read {short(str(file))}: {error.strerror}") from error


def parse_epochs(content: bytes, name: str) -> list[Epoch]:
    """Return the epochs in a ``metrics.jsonl``; a UsageError names file and line of a mistake."""
    lines = enumerate(content.splitlines(), 1)
    return [parse(Epoch, line, f"{name}, line {number}") for number, line in lines]


def read_curve(run: RunFolder, metric: str) -> dict[int, float]:
    """Return epoch (from 0) -> validation value of a run, for the epochs that were validated."""
    content = read_file(run.metrics)
    complete_lines = content[: content.rfind(b"\n") + 1]  # the run may be writing the last line
    curve = {}
    for epoch in parse_epochs(complete_lines, str(run.metrics)):
        if epoch.valid and metric in epoch.valid:
            curve[epoch.epoch] = epoch.valid[metric]
    return curve


class StudyFolder:
    """The folder of one study, at a path."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.runs = self.path / "runs"

    @classmethod
    def from_plan(cls, plan: Plan, path: str | Path | None) -> StudyFolder:
        """Return the study folder at ``path``; by default saved/<dataset>/studies/<title>/."""
        if path is None:
            title = re.sub(r"[^\w.]+", "-", plan.title.lower()).strip("-.")
            path = Path("saved") / plan.dataset / "studies" / (title[:_MAX_TITLE] or "study")
        return cls(path)

    def write_plan(self, plan: Plan) -> None:
        """Write the plan, so that the study can be resumed and reported without its file."""
        self._write("study.json", {"name": plan.source.name, "content": plan.source.content})

    def read_plan(self) -> Plan | None:
        """Return the plan of the study in this folder; None if it has none."""
        study = self._read(_Study, "study.json")
        return make_plan(Source(study.name, study.content)) if study else None

    def run(self, digest: str) -> RunFolder:
        """Return the folder of a run, which need not exist yet."""
        return RunFolder(self.runs / digest)

    def write_fit(self, digest: str, facts: dict[str, Any]) -> None:
        """Write facts of a run; other facts of an earlier attempt are kept."""
        merged = {**self.read_fit(digest), **facts, "digest": digest}
        if merged.get("status") != FAILED:  # an earlier attempt may have failed
            merged.pop("reason", None)
            merged.pop("lost", None)
        self._write(f"runs/{digest}/fit.json", merged)

    def read_fit(self, digest: str) -> dict[str, Any]:
        """Return the facts of a run, as :func:`read_run_facts`; empty for an empty digest."""
        return read_run_facts(self.run(digest)) if digest else {}

    def has_weights(self, digest: str) -> bool:
        """Return whether a run is finished and has its weights, not only its results."""
        facts = self.read_fit(digest)
        is_trained_here = facts.get("status") == DONE and not facts.get(KNOWN_FROM)
        return is_trained_here and self.run(digest).checkpoint.is_file()

    def read_current(self) -> dict[str, dict[str, str]]:
        """Return name of a fit -> digests of its ``run`` and of what was ``asked`` of it."""
        current = self._read(_Current, "current.json")
        return current.model_dump() if current else {}

    def find_current_digests(self, plan: Plan) -> dict[str, str]:
        """Return name of a fit -> digest of its run; a run made for another request is left out."""
        current = self.read_current()
        digests = {}
        for name, request in digest_requests(plan).items():
            if name in current and current[name]["asked"] == request:
                digests[name] = current[name]["run"]
        return digests

    def write_current(self, plan: Plan, digests: dict[str, str]) -> None:
        """Write the digests of runs by the names of their fits; other fits keep their runs."""
        current = self.read_current()
        for name, request in digest_requests(plan).items():
            if name in digests:
                current[name] = {"run": digests[name], "asked": request}
        self._write("current.json", current)

    def read_facts(self) -> StudyFacts:
        """Return the facts of the study: data, versions, and choices of searches."""
        return self._read(StudyFacts, "facts.json") or StudyFacts()

    def write_facts(self, facts: StudyFacts) -> None:
        """Write the facts of the study."""
        self._write("facts.json", facts.model_dump(exclude_unset=True))

    def _read(self, layout: type[_Parsed], name: str) -> _Parsed | None:
        """Return the content of a json file; None without a file, a UsageError if damaged."""
        content = read_file(self.path / name)
        try:
            return parse(layout, content, str(self.path / name)) if content else None
        except UsageError as error:
            raise UsageError(f"{error}; delete it, and run `compare` without --report") from error

    def _write(self, name: str, content: dict[str, Any]) -> None:
        """Write a json file in the folder, which is made if need be."""
        file = self.path / name
        make_folder(file.parent)
        write_json(file, content)


def read_run_facts(run: RunFolder) -> dict[str, Any]:
    """Return the facts in a run's folder; empty if it has none, a UsageError if damaged."""
    file = run.path / "fit.json"
    content = read_file(file)
    try:
        facts = parse(RunFacts, content, str(file)) if content else RunFacts()
    except UsageError as error:
        advice = f"delete {run.path}, and `compare` makes the run again"
        raise UsageError(f"{error}; {advice}") from error
    return facts.model_dump(exclude_unset=True)
