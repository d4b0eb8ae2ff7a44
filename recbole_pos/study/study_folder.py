"""The folder of a study: what was planned, and every run that it ever made.

Runs stand under the digest of what decides them (configuration, data, split, version of the
numerics), so that a changed option makes a new run beside the old one and nothing is trained twice.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import RunFolder, make_folder
from recbole_pos.files import only_writer, write_json
from recbole_pos.runs.storage import Mirror, resolve_storage
from recbole_pos.study import schema
from recbole_pos.study.expand import asked_digest, digest, fits
from recbole_pos.study.plan import Plan
from recbole_pos.study.results import DONE, FAILED
from recbole_pos.study.study_file import make_plan
from recbole_pos.study.study_source import Source

FIT = "fit.json"  # in a run's folder: of which fit it is
KNOWN_FROM = "known_from"  # in it: the file of a packed study that the run was taken from
_AGAIN = "delete it, and run `compare` without --report"


class StudyFolder:
    """The folder of one study.

    Args:
        path: path of the folder.

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
        """Return that of a plan: saved/<dataset>/studies/<title>/ unless another one is given."""
        if path is None:
            title = re.sub(r"[^\w.]+", "-", plan.title.lower()).strip("-.")[:60] or "study"
            path = Path("saved") / plan.dataset / "studies" / title
        return cls(path)

    def use_storage(self, given: str | None, make: bool = True) -> None:
        """Let trainings keep their runs on a storage: the one that is given, or as before.

        Raises:
            UsageError: as :func:`recbole_pos.runs.storage.resolve_storage`.
        """
        kept = self._plan().get("storage")
        self.storage = resolve_storage(given, self.path, make) if given else kept

    def mirror(self, digest: str) -> Mirror | None:
        """Return a run and its copy on the storage; None where none exists."""
        return Mirror(self.run(digest), f"{self.storage}/{digest}") if self.storage else None

    def is_begun(self, digest: str) -> bool:
        """Return whether a run has a checkpoint to resume from."""
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

    def _plan(self) -> dict[str, Any]:
        return schema.read(schema.Kept, self.plan, "delete it, and give the file of the study")

    def write_plan(self, plan: Plan) -> None:
        """Keep a plan, so that the study can be continued and shown without its file."""
        content = {"name": plan.source.name, "content": plan.source.content}
        storage = self.storage or self._plan().get("storage")
        _write(self.plan, {**content, **({"storage": storage} if storage else {})})

    def read_plan(self) -> Plan:
        """Return the plan of the study that is here.

        Raises:
            UsageError: if none exists, or it is damaged.
        """
        kept = self._plan()
        if not kept:
            raise UsageError(f"{self.path} is not the folder of a study: no study.json")
        return make_plan(Source(kept["name"], kept["content"]))

    def run(self, digest: str) -> RunFolder:
        """Return where a run is, or will be."""
        return RunFolder(self.runs / digest)

    def write_fit(self, digest: str, facts: dict[str, Any]) -> None:
        """Note what a run is, and what became of it."""
        known = {**(self.fit(digest) or {}), **facts, "digest": digest}
        if known.get("status") != FAILED:
            known.pop("reason", None)  # of an attempt before
        _write(self.runs / digest / FIT, known)

    def fit(self, digest: str) -> dict[str, Any] | None:
        """Return what is known of a run; None if nothing is.

        Raises:
            UsageError: if the file is damaged; names the field.
        """
        return (_facts(self.runs / digest) or None) if digest else None

    def has_weights(self, digest: str) -> bool:
        """Return whether the weights of a finished run are here, and not only what it found."""
        known = self.fit(digest) or {}
        return known.get("status") == DONE and not known.get(KNOWN_FROM) and self.is_begun(digest)

    def current(self, plan: Plan) -> dict[str, str]:
        """Return fit -> digest of its run, of those made for what the plan asks of them."""
        noted = self._noted()
        return {
            one.name: noted[one.name]["run"]
            for one in fits(plan)
            if one.name in noted and noted[one.name]["asked"] == asked_digest(plan, one)
        }

    def write_current(self, plan: Plan, digests: dict[str, str]) -> None:
        """Note what runs the plan's fits are; those of rows that were not asked for stay."""
        found = self._noted()
        for one in fits(plan):
            if one.name in digests:
                found[one.name] = {"run": digests[one.name], "asked": asked_digest(plan, one)}
        _write(self.path / "current.json", found)

    def _noted(self) -> dict[str, Any]:
        """Fit -> ``run``, its digest, and what was ``asked``."""
        kept = schema.read(schema.Current, self.path / "current.json", _AGAIN)
        return {name: one for name, one in kept.items() if isinstance(one, dict)}

    def facts(self) -> dict[str, Any]:
        """Return what is known of the data and of what they were trained with."""
        return schema.read(schema.Facts, self.path / "facts.json", _AGAIN)

    def write_facts(self, facts: dict[str, Any]) -> None:
        """Keep what is known of the data."""
        _write(self.path / "facts.json", facts)

    def drawn(self, row: str, space: str) -> dict[int, dict[str, Any]]:
        """Return trial -> what a search has drawn for a row, by number.

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
        _write(self._search_file(row), {"space": space, "drawn": drawn})

    def search(self, row: str) -> dict[str, Any]:
        """Return what is kept of a row's search: ``space``, ``drawn``; empty if nothing is."""
        return schema.read(
            schema.Drawn, self._search_file(row), "delete it, and the search draws again"
        )

    def _search_file(self, row: str) -> Path:
        """Of a row, whose letters and digits others may share."""
        plain = re.sub(r"[^A-Za-z0-9]+", "-", row)[:60]
        return self.searches / f"{plain}-{digest({'row': row})[:8]}.json"


def _write(file: Path, content: dict[str, Any]) -> None:
    make_folder(file.parent)
    write_json(file, content)


def known_from(run: Path) -> str:
    """Return the packed study that a run was taken from; empty for one that was trained."""
    return _facts(run).get(KNOWN_FROM, "")


def _facts(run: Path) -> dict[str, Any]:
    advice = f"delete {run}, and `compare` makes the run again"
    return schema.read(schema.RunFacts, run / FIT, advice)


def commit() -> str:
    """Return the commit of the checkout that the package runs from; empty if it is installed."""
    command = ["git", "-C", str(Path(__file__).resolve().parent)]
    command += ["describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
