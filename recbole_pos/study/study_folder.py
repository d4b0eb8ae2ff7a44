"""The folder of a study: its plan, and every run that it has trained.

The name of a run is a digest of configuration, data and split, so that a changed option makes a new
run beside the old one, and nothing is trained twice.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import RunFolder, make_folder
from recbole_pos.files import read_capped, write_json
from recbole_pos.runs import DONE, FAILED
from recbole_pos.study.digests import digest_requests
from recbole_pos.study.plan import Plan
from recbole_pos.study.study_file import make_plan
from recbole_pos.study.study_source import Source

KNOWN_FROM = "known_from"  # key of a run's facts for the packed study that it was taken from
_MAX_TITLE = 60  # most characters of a title in the path of a folder


@dataclass
class StudyFacts:
    """``facts.json``: facts of the data, as in ``Results``, and the choices of the searches.

    Attributes:
        chosen: row -> trial that its search has chosen; None while trials are left.
        chosen_by: row -> metric of its search.
        unmade: name of a fit that failed before its run had a folder -> reason.
    """

    versions: dict[str, str] = field(default_factory=dict)
    data: dict[str, int | str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    split: dict[str, Any] = field(default_factory=dict)
    chosen: dict[str, int | None] = field(default_factory=dict)
    chosen_by: dict[str, str] = field(default_factory=dict)
    unmade: dict[str, str] = field(default_factory=dict)


def read_json(file: Path) -> dict[str, Any]:
    """Return the mapping in a file of json, empty without a file; a UsageError if it is damaged."""
    try:
        content = json.loads(read_capped(file))
        if not isinstance(content, dict):
            raise ValueError("expected a mapping")
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UsageError(f"{file} is damaged: {error}; delete it, and it is made again") from error
    return content


def read_curve(run: RunFolder, metric: str) -> dict[int, float]:
    """Return epoch (from 0) -> validation value of a run, for the epochs that were validated."""
    epochs = read_epochs(run)
    return {e["epoch"]: e["valid"][metric] for e in epochs if metric in (e["valid"] or {})}


def read_epochs(run: RunFolder) -> list[dict[str, Any]]:
    """Return the complete lines of ``metrics.jsonl``, whose last line the run may be writing."""
    content = run.metrics.read_bytes() if run.metrics.is_file() else b""
    return [json.loads(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]


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
        study = read_json(self.path / "study.json")
        return make_plan(Source(study["name"], study["content"])) if study else None

    def run(self, digest: str) -> RunFolder:
        """Return the folder of a run, which need not exist yet."""
        return RunFolder(self.runs / digest)

    def write_fit(self, digest: str, facts: dict[str, Any]) -> None:
        """Write facts of a run: the fit, status and results; others of an earlier attempt stay."""
        merged = {**self.read_fit(digest), **facts, "digest": digest}
        if merged.get("status") != FAILED:  # an earlier attempt may have failed
            merged.pop("reason", None)
            merged.pop("lost", None)
        self._write(f"runs/{digest}/fit.json", merged)

    def read_fit(self, digest: str) -> dict[str, Any]:
        """Return the facts of a run; empty if it has none, or for an empty digest."""
        return read_json(self.run(digest).path / "fit.json") if digest else {}

    def has_weights(self, digest: str) -> bool:
        """Return whether a run is finished and has its weights, not only its results."""
        facts = self.read_fit(digest)
        is_trained_here = facts.get("status") == DONE and not facts.get(KNOWN_FROM)
        return is_trained_here and self.run(digest).checkpoint.is_file()

    def find_current_digests(self, plan: Plan) -> dict[str, str]:
        """Return name of a fit -> digest of its run; a run made for another request is left out."""
        current = read_json(self.path / "current.json")
        return {
            name: current[name]["run"]
            for name, request in digest_requests(plan).items()
            if name in current and current[name]["asked"] == request
        }

    def write_current(self, plan: Plan, digests: dict[str, str]) -> None:
        """Write the digests of runs by the names of their fits; other fits keep their runs."""
        current = read_json(self.path / "current.json")
        for name, request in digest_requests(plan).items():
            if name in digests:
                current[name] = {"run": digests[name], "asked": request}
        self._write("current.json", current)

    def read_facts(self) -> StudyFacts:
        """Return the facts of the study: data, versions, and choices of searches."""
        return StudyFacts(**read_json(self.path / "facts.json"))

    def write_facts(self, facts: StudyFacts) -> None:
        """Write the facts of the study."""
        self._write("facts.json", asdict(facts))

    def _write(self, name: str, content: dict[str, Any]) -> None:
        """Write a json file in the folder, which is made if need be."""
        file = self.path / name
        make_folder(file.parent)
        write_json(file, content)
