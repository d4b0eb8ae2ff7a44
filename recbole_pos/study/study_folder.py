"""The folder of a study: its plan, and every run that it has trained.

The name of a run is a digest of configuration, data, split and version of the numerics, so that a
changed option makes a new run beside the old one, and nothing is trained twice.
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
from recbole_pos.study.expand import asked_digest, digest, list_fits
from recbole_pos.study.plan import Plan
from recbole_pos.study.results import DONE, FAILED
from recbole_pos.study.study_file import make_plan
from recbole_pos.study.study_source import Source

FIT = "fit.json"  # file in a run's folder with the facts of its fit
KNOWN_FROM = "known_from"  # its key for the packed study that the run was taken from
_AGAIN = "delete it, and run `compare` without --report"


class StudyFolder:
    """The folder of one study.

    Args:
        path: path of the folder.

    Attributes:
        storage: path or URI for copies of runs in training; None where all machines reach the
            folder itself.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.storage: str | None = None
        self.plan = self.path / "study.json"
        self.runs = self.path / "runs"
        self.searches = self.path / "searches"

    @classmethod
    def from_plan(cls, plan: Plan, path: str | Path | None) -> StudyFolder:
        """Return the folder at a path, or if None saved/<dataset>/studies/<title>/ of a plan."""
        if path is None:
            title = re.sub(r"[^\w.]+", "-", plan.title.lower()).strip("-.")[:60] or "study"
            path = Path("saved") / plan.dataset / "studies" / title
        return cls(path)

    def use_storage(self, given: str | None, make: bool = True) -> None:
        """Set the storage of runs: the given one, or that of earlier calls.

        Args:
            given: path or URI; None for that of earlier calls.
            make: whether to create the place on the storage.

        Raises:
            UsageError: as :func:`recbole_pos.runs.storage.resolve_storage`.
        """
        kept = self._plan().get("storage")
        self.storage = resolve_storage(given, self.path, make) if given else kept

    def mirror(self, digest: str) -> Mirror | None:
        """Return the copy of a run on the storage; None without a storage."""
        return Mirror(self.run(digest), f"{self.storage}/{digest}") if self.storage else None

    def is_begun(self, digest: str) -> bool:
        """Return whether a run has a checkpoint to resume from, here or on the storage."""
        mirror, file = self.mirror(digest), self.run(digest).checkpoint
        return file.is_file() or (mirror is not None and mirror.has(file))

    @property
    def begun(self) -> bool:
        """Whether the folder has a study."""
        return self.plan.is_file()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Reserve the folder for this process; for use in a ``with`` block.

        Raises:
            UsageError: if another process trains for the study.
        """
        make_folder(self.path)
        with only_writer(self.path, "compared"):
            yield

    def _plan(self) -> dict[str, Any]:
        """Return the content of study.json; empty if there is none."""
        return schema.read(schema.Kept, self.plan, "delete it, and give the file of the study")

    def write_plan(self, plan: Plan) -> None:
        """Write the plan, so that the study can be resumed and reported without its file."""
        content = {"name": plan.source.name, "content": plan.source.content}
        storage = self.storage or self._plan().get("storage")
        _write(self.plan, {**content, **({"storage": storage} if storage else {})})

    def read_plan(self) -> Plan:
        """Return the plan of the study in this folder.

        Raises:
            UsageError: if it has none, or a damaged one.
        """
        kept = self._plan()
        if not kept:
            raise UsageError(f"{self.path} is not the folder of a study: no study.json")
        return make_plan(Source(kept["name"], kept["content"]))

    def run(self, digest: str) -> RunFolder:
        """Return the folder of a run, which need not exist yet."""
        return RunFolder(self.runs / digest)

    def write_fit(self, digest: str, facts: dict[str, Any]) -> None:
        """Write facts of a run, over those of an earlier attempt."""
        merged = {**(self.fit(digest) or {}), **facts, "digest": digest}
        if merged.get("status") != FAILED:
            merged.pop("reason", None)  # of an earlier attempt
        _write(self.runs / digest / FIT, merged)

    def fit(self, digest: str) -> dict[str, Any] | None:
        """Return the facts of a run; None if it has none.

        Raises:
            UsageError: if the file is damaged; names the field.
        """
        return (_facts(self.runs / digest) or None) if digest else None

    def has_weights(self, digest: str) -> bool:
        """Return whether a run is finished and has its weights, not only its results."""
        facts = self.fit(digest) or {}
        return facts.get("status") == DONE and not facts.get(KNOWN_FROM) and self.is_begun(digest)

    def current(self, plan: Plan) -> dict[str, str]:
        """Return name of a fit -> digest of its run, of runs made for what the plan asks now."""
        noted = self._noted()
        return {
            fit.name: noted[fit.name]["run"]
            for fit in list_fits(plan)
            if fit.name in noted and noted[fit.name]["asked"] == asked_digest(plan, fit)
        }

    def write_current(self, plan: Plan, digests: dict[str, str]) -> None:
        """Write the runs of fits; fits without a digest keep theirs.

        Args:
            plan: plan of the study.
            digests: name of a fit -> digest of its run.
        """
        noted = self._noted()
        for fit in list_fits(plan):
            if fit.name in digests:
                noted[fit.name] = {"run": digests[fit.name], "asked": asked_digest(plan, fit)}
        _write(self.path / "current.json", noted)

    def _noted(self) -> dict[str, Any]:
        """Return name of a fit -> digests of its ``run`` and of what was ``asked`` of it."""
        kept = schema.read(schema.Current, self.path / "current.json", _AGAIN)
        return {name: entry for name, entry in kept.items() if isinstance(entry, dict)}

    def facts(self) -> dict[str, Any]:
        """Return the facts of the study: data, versions, and choices of searches."""
        return schema.read(schema.Facts, self.path / "facts.json", _AGAIN)

    def write_facts(self, facts: dict[str, Any]) -> None:
        """Write the facts of the study."""
        _write(self.path / "facts.json", facts)

    def drawn(self, row: str, space: str) -> dict[int, dict[str, Any]]:
        """Return number of a trial -> options that a search has sampled for a row.

        Args:
            row: name of the row.
            space: digest of its space; samples from another space do not count.
        """
        kept = self.search(row)
        if kept.get("space", space) != space:
            return {}
        return {int(number): options for number, options in (kept.get("drawn") or {}).items()}

    def write_drawn(self, row: str, space: str, drawn: dict[int, dict[str, Any]]) -> None:
        """Write the samples of a search, and the digest of its space."""
        _write(self._search_file(row), {"space": space, "drawn": drawn})

    def search(self, row: str) -> dict[str, Any]:
        """Return the samples of a row's search (``space``, ``drawn``); empty if there are none."""
        return schema.read(
            schema.Drawn, self._search_file(row), "delete it, and the search draws again"
        )

    def _search_file(self, row: str) -> Path:
        """Return the file of a row's search; a digest separates names that differ in signs only."""
        plain = re.sub(r"[^A-Za-z0-9]+", "-", row)[:60]
        return self.searches / f"{plain}-{digest({'row': row})[:8]}.json"


def _write(file: Path, content: dict[str, Any]) -> None:
    make_folder(file.parent)
    write_json(file, content)


def known_from(run: Path) -> str:
    """Return the packed study that a run was taken from; empty for one that was trained."""
    return _facts(run).get(KNOWN_FROM, "")


def _facts(run: Path) -> dict[str, Any]:
    """Return the facts in the folder of a run; empty if there are none."""
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
