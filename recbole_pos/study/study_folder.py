"""The folder of a study: what was planned, and every run that it ever made.

Runs stand under the digest of what decides them (configuration, data, split, version of the
numerics), so that a changed option makes a new run beside the old one and nothing is trained twice.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import RunFolder, make_folder
from recbole_pos.files import only_writer, write_text
from recbole_pos.runs.storage import Mirror, place_of
from recbole_pos.study import schema
from recbole_pos.study.expand import asked_digest, digest, fits
from recbole_pos.study.plan import Plan
from recbole_pos.study.reading import make_plan
from recbole_pos.study.results import DONE, FAILED
from recbole_pos.study.source import Source

FIT = "fit.json"  # in a run's folder: of which fit it is
KNOWN_FROM = "known_from"  # in it: the file of a packed study that the run was taken from


class StudyFolder:
    """The folder of one study.

    Args:
        path: of the folder.

    Attributes:
        storage: path or URI where trainings keep their runs while they last; None where all
            machines reach the folder itself.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.storage: str | None = None
        self.plan = self.path / "study.json"
        self.runs = self.path / "runs"
        self.searches = self.path / "searches"

    @classmethod
    def of(cls, plan: Plan, path: str | Path | None) -> StudyFolder:
        """That of a plan: saved/<dataset>/studies/<title>/ unless another one is given."""
        if path is None:
            title = re.sub(r"[^\w.]+", "-", plan.title.lower()).strip("-.")[:60] or "study"
            path = Path("saved") / plan.dataset / "studies" / title
        return cls(path)

    def use_storage(self, given: str | None, make: bool = True) -> None:
        """Let trainings keep their runs on a storage: the one that is given, or as before.

        Raises:
            UsageError: as :func:`recbole_pos.runs.storage.place_of`.
        """
        kept = self._plan().get("storage")
        self.storage = place_of(given, self.path, make) if given else kept

    def mirror(self, digest: str) -> Mirror | None:
        """A run and its copy on the storage; None where there is none."""
        return Mirror(self.run(digest), f"{self.storage}/{digest}") if self.storage else None

    def is_begun(self, digest: str) -> bool:
        """Whether a run has a checkpoint to go on from."""
        mirror, file = self.mirror(digest), self.run(digest).checkpoint
        return file.is_file() or (mirror is not None and mirror.has(file))

    @property
    def begun(self) -> bool:
        """Whether a study is here."""
        return self.plan.is_file()

    @contextmanager
    def held(self) -> Iterator[None]:
        """While this process trains for the study.

        Raises:
            UsageError: if another process does.
        """
        make_folder(self.path)
        with only_writer(self.path, "compared"):
            yield

    def write_plan(self, plan: Plan) -> None:
        """Keep a plan, so that the study can be continued and shown without its file."""
        if self.begun:  # runs noted by 0.1 are of the plan that was here until now
            self.write_current(self.read_plan(), {})
        content = {"name": plan.source.name, "content": plan.source.content}
        storage = self.storage or self._plan().get("storage")
        content |= {"storage": storage} if storage else {}
        write_text(self.plan, json.dumps(content, indent=2, default=str) + "\n")

    def read_plan(self) -> Plan:
        """The plan of the study that is here.

        Raises:
            UsageError: if there is none, or it is damaged.
        """
        kept = self._plan()
        if not kept:
            raise UsageError(f"{self.path} is not the folder of a study: no study.json")
        return make_plan(Source(kept["name"], kept["content"]))

    def _plan(self) -> dict[str, Any]:
        return schema.read(schema.Kept, self.plan, "delete it, and give the file of the study")

    def run(self, digest: str) -> RunFolder:
        """Where a run is, or will be."""
        return RunFolder(self.runs / digest)

    def write_fit(self, digest: str, facts: dict[str, Any]) -> None:
        """Say what a run is, and what became of it."""
        make_folder(self.runs / digest)
        known = {**(self.fit(digest) or {}), **facts, "digest": digest}
        if known.get("status") != FAILED:
            known.pop("reason", None)  # of an attempt before
        text = json.dumps(known, indent=2, default=str)
        write_text(self.runs / digest / FIT, text + "\n")

    def fit(self, digest: str) -> dict[str, Any] | None:
        """What was said of a run; None if nothing was.

        Raises:
            UsageError: if the file is damaged; names the field.
        """
        if not digest:
            return None
        return _facts(self.runs / digest) or None

    def has_weights(self, digest: str) -> bool:
        """Whether the weights of a finished run are here, and not only what it found."""
        known = self.fit(digest) or {}
        return known.get("status") == DONE and not known.get(KNOWN_FROM) and self.is_begun(digest)

    def current(self, plan: Plan) -> dict[str, str]:
        """Fit -> digest of its run, of those that were made for what the plan asks of them."""
        noted = self._noted(plan)
        return {
            one.name: noted[one.name]["run"]
            for one in fits(plan)
            if one.name in noted and noted[one.name]["asked"] == asked_digest(plan, one)
        }

    def write_current(self, plan: Plan, digests: dict[str, str]) -> None:
        """Note what runs the plan's fits are; those of rows that were not asked for stay."""
        found = self._noted(plan)
        for one in fits(plan):
            if one.name in digests:
                found[one.name] = {"run": digests[one.name], "asked": asked_digest(plan, one)}
        write_text(self.path / "current.json", json.dumps(found, indent=2) + "\n")

    def _noted(self, plan: Plan) -> dict[str, dict[str, str]]:
        """Fit -> ``run``, its digest, and what was ``asked``; of 0.1, which did not note that, the
        plan's."""
        file = self.path / "current.json"
        kept = schema.read(schema.Current, file, "delete it, and run `compare` without --report")
        found = {name: one for name, one in kept.items() if isinstance(one, dict)}
        for one in fits(plan):
            if isinstance(kept.get(one.name), str):
                found[one.name] = {"run": kept[one.name], "asked": asked_digest(plan, one)}
        return found

    def facts(self) -> dict[str, Any]:
        """What is known of the data and of what they were trained with."""
        file = self.path / "facts.json"
        return schema.read(schema.Facts, file, "delete it, and run `compare` without --report")

    def write_facts(self, facts: dict[str, Any]) -> None:
        """Keep what is known of the data."""
        write_text(self.path / "facts.json", json.dumps(facts, indent=2, default=str) + "\n")

    def drawn(self, row: str, space: str) -> dict[int, dict[str, Any]]:
        """Trial -> what a search has drawn for a row, by number.

        Args:
            row: its name.
            space: digest of what was drawn from; draws from another space are none of this search.
        """
        kept = self.search(row)
        if kept.get("space", space) != space:
            return {}
        return {int(number): options for number, options in (kept.get("drawn") or {}).items()}

    def write_drawn(self, row: str, space: str, drawn: dict[int, dict[str, Any]]) -> None:
        """Keep what a search has drawn for a row."""
        make_folder(self.searches)
        content = {"space": space, "drawn": drawn}
        write_text(self._search_file(row), json.dumps(content, indent=2, default=str) + "\n")

    def search(self, row: str) -> dict[str, Any]:
        """What is kept of a row's search: ``space``, ``drawn``; empty where nothing is."""
        file = self._search_file(row)
        file = file if file.is_file() else self.searches / f"{_plain(row)}.json"  # 0.1
        return schema.read(schema.Drawn, file, "delete it, and the search draws again")

    def _search_file(self, row: str) -> Path:
        return self.searches / f"{_plain(row)[:60]}-{digest({'row': row})[:8]}.json"


def _plain(row: str) -> str:
    """The letters and digits of a name, which others may share."""
    return re.sub(r"[^A-Za-z0-9]+", "-", row)[:200]


def known_from(run: Path) -> str:
    """The packed study that a run was taken from; empty for one that was trained."""
    return _facts(run).get(KNOWN_FROM, "")


def _facts(run: Path) -> dict[str, Any]:
    advice = f"delete {run}, and `compare` makes the run again"
    return schema.read(schema.RunFacts, run / FIT, advice)


def commit() -> str:
    """The commit of the checkout that the package runs from; empty where it is installed."""
    package = Path(__file__).resolve().parent
    command = ["git", "-C", str(package), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
