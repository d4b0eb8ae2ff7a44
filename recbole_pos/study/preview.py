"""Preview of what a study would train."""

from __future__ import annotations

from collections import Counter

from recbole_pos.study.expand import dry_run, dry_run_sentence
from recbole_pos.study.rendered_table import Cell, RenderedTable
from recbole_pos.study.results import DONE
from recbole_pos.study.scheduler import CONTINUED, NEW, OPEN, Scheduler

_WORDS = ("configuration", "model", "options", "search", "after")
_SPARE = ("after", "trials", "seeds", "search", "model")
_STATES = {
    DONE: "{} finished",
    CONTINUED: "{} to resume from a checkpoint",
    NEW: "{} to be trained",
    OPEN: "{} that a search decides first",
}


def preview(scheduler: Scheduler) -> tuple[list[str], RenderedTable]:
    """Return sentences and a table of the configurations that would be trained.

    The data are read only if the study has runs already, to find which of them are still its.
    """
    plan, folder = scheduler.plan, scheduler.folder
    sentences, frame = [dry_run_sentence(plan, scheduler.rows)], dry_run(plan, scheduler.rows)
    if folder.runs.is_dir() or scheduler.packed:
        left = scheduler.left()
        # the chosen trial is also the final run, and not counted twice, if its weights are here
        fits = [
            (fit.row, left[fit.name])
            for fit in scheduler.fits
            if not fit.repeats or left[fit.name] == NEW
        ]
        counts, by_row = Counter(state for _, state in fits), Counter(fits)
        parts = [text.format(counts[state]) for state, text in _STATES.items() if counts[state]]
        sentences.append(f"In {folder.path}: {', '.join(parts)}")
        for place, state in enumerate((DONE, CONTINUED)):
            values = [by_row[row, state] for row in frame["configuration"]]
            frame.insert(list(frame.columns).index("runs") + 1 + place, state, values)
    frame = frame.loc[:, (frame != "").any()]  # no column for what no row has
    columns = tuple(frame.columns)
    lines = tuple(tuple(Cell(str(value)) for value in line) for line in frame.to_numpy())
    words = frozenset(columns.index(name) for name in _WORDS if name in columns)
    spare = tuple(columns.index(name) for name in _SPARE if name in columns)
    return sentences, RenderedTable("", columns, lines, (), words, spare, "a wider terminal")
