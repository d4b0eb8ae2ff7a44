"""Fill the tables of results/ from the runs that are kept in results/runs/.

    python studies/pages.py [--data_path FOLDER]... [--check] [PAGE ...]

For each study with kept runs, results/tables/STUDY.md has all tables that ``recbole-pos compare
studies/STUDY.yaml --known results/runs/STUDY.tar.xz`` makes, with the trials of its searches, the
conditions of its runs and the command; results/tables/STUDY.csv has the figures. In a page of
results, ``<!-- begin STUDY :: TITLE -->`` to ``<!-- end -->`` is the short form of one of these
tables: its main metric and the differences. STUDY@DATASET is the study with ``-d DATASET``.

Nothing is trained. Data come from the folders given, from dataset/, or from the scripts that
generate them; without them, or without the content vectors of a study, a table stays as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

import recbole_pos
from recbole_pos.study.collect import collect_results
from recbole_pos.study.plan import list_fits
from recbole_pos.study.rendered_table import format_duration
from recbole_pos.study.study_file import read_plan
from recbole_pos.study.study_folder import StudyFolder

ROOT = Path(__file__).resolve().parent.parent
STUDIES, RESULTS, RUNS = ROOT / "studies", ROOT / "results", ROOT / "results" / "runs"
TABLES = RESULTS / "tables"
_TABLE = re.compile(r"(<!-- begin (\S+) :: (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_NOT_RUN = re.compile(r"^\| (.+?) \| 0 of \d+ \|.*\n", re.MULTILINE)
_SHIPPED = "ml-100k"  # lies in recbole's wheel
# Datasets that a script makes: name -> its command, to which the folder is added.
_MADE = {
    "weekly": [STUDIES / "to_rope/make_rhythm.py", "{folder}"],
    "bursts": [STUDIES / "to_rope/make_rhythm.py", "{folder}"],
    "toyshop-shuffled": [
        *(STUDIES / "positions/shuffle.py", "toyshop", "{folder}"),
        *("--data_path", ROOT / "dataset"),
    ],
    "ml-100k-shuffled": [STUDIES / "positions/shuffle.py", "ml-100k", "{folder}"],
    "ml-100k-times": [STUDIES / "positions/shuffle.py", "ml-100k", "{folder}", "--times"],
}


@dataclass(frozen=True)
class Page:
    """A page as it is and as it should be."""

    path: Path
    before: str
    after: str


class Studies:
    """Tables of studies, each made once.

    Args:
        folders: where data may lie.
        work: an empty folder.
    """

    def __init__(self, folders: Sequence[Path], work: Path) -> None:
        self.folders = [*folders, ROOT / "dataset", work / "data"]
        self.work = work
        self.made: dict[str, dict[str, str] | None] = {}
        self.pages: dict[str, str] = {}  # study -> the page of all its tables
        self.figures: dict[str, str] = {}  # study -> the same as csv

    def tables(self, name: str) -> dict[str, str] | None:
        """Title -> table; None without the data of the study.

        Raises:
            FileNotFoundError: if there is no such study, or no runs of it.
        """
        if name not in self.made:
            self.made[name] = self._tables(name)
        return self.made[name]

    def _tables(self, name: str) -> dict[str, str] | None:
        compared = self.compared(name)
        if compared is None:
            return None
        out, runs, command = compared
        parts = re.split(r"^## (.+)\n", (out / "table.md").read_text("utf-8"), flags=re.MULTILINE)
        texts = zip(parts[1::2], parts[2::2], strict=True)
        tables = {title: _only_table(text) for title, text in texts}
        folder = StudyFolder(out)
        plan = folder.read_plan()
        facts = json.loads((out / "facts.json").read_text("utf-8"))
        trials = collect_results(plan, folder).searches
        sections = {
            **tables,
            **({"Trials of the searches": _trials(trials)} if len(trials) else {}),
        }
        text = "\n".join(f"## {title}\n\n{table}" for title, table in sections.items())
        self.pages[name] = (
            f"# {plan.title}: all tables\n\n{_conditions(runs, facts, command)}\n{text}"
        )
        self.figures[name] = pd.read_csv(out / "table.csv").to_csv(index=False, float_format="%.6g")
        return tables

    def compared(self, name: str) -> tuple[Path, pd.DataFrame, list[object]] | None:
        """Compares the runs that are kept of a study; None without its data.

        Returns:
            Folder of the study with its tables, its runs, and what follows ``compare`` in a shell.

        Raises:
            FileNotFoundError: as :meth:`tables`.
        """
        of, _, other = name.partition("@")
        study, runs = STUDIES / f"{of}.yaml", RUNS / f"{name}.tar.xz"
        for file in (study, runs):
            if not file.is_file():
                raise FileNotFoundError(f"{name}: there is no {file.relative_to(ROOT)}")
        plan = read_plan(study)
        place = self._data(other or plan.dataset)
        vectors = {fit.options.get("item_vectors") for fit in list_fits(plan)} - {None}
        if place is None or not all(map(os.path.exists, vectors)):
            return None
        out = self.work / name.replace("/", "-")
        given = {"known": (runs,), "report": True, "run_dir": out, "verbose": False}
        found = recbole_pos.compare(str(study), other or None, config_dict=place, **given)
        assert found is not None
        ours = place == {"data_path": str(ROOT / "dataset")}
        data = ["--data_path", "dataset" if ours else "FOLDER"] if place else []
        command = [study.relative_to(ROOT), *(["-d", other] if other else [])]
        return out, found.runs, [*command, "--known", runs.relative_to(ROOT), *data]

    def _data(self, dataset: str) -> dict[str, str] | None:
        """The option that names where the data are; None where they are not."""
        if dataset == _SHIPPED:
            return {}
        if dataset in _MADE and not (self.work / "data" / dataset).is_dir():
            command = [str(part).format(folder=self.work / "data") for part in _MADE[dataset]]
            subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        for folder in self.folders:
            if (folder / dataset / f"{dataset}.inter").is_file():
                return {"data_path": str(folder)}
        return None


def _only_table(text: str) -> str:
    """A table with the rows that have runs, and the names of those that have none."""
    table = "".join(line for line in text.splitlines(keepends=True) if line.startswith("|"))
    absent = "; ".join(_NOT_RUN.findall(table))
    words = textwrap.fill(f"Not run: {absent}.", 120, break_on_hyphens=False)
    return _NOT_RUN.sub("", table) + (f"\n{words}\n" if absent else "")


def _trials(searches: pd.DataFrame) -> str:
    """Return a table with a line per trial: options and validation metric, the best one first."""
    best = searches.dropna(subset="value").sort_values(["row", "value"], ascending=[True, False])
    lines = ["| configuration | trial | validation |", "| --- | --- | ---: |"]
    lines += [f"| {one.row} | {one.options} | {one.value:.4f} |" for one in best.itertuples()]
    return "\n".join(lines) + "\n"


def _cells(table: str) -> list[list[str]]:
    """Return the cells of a table in markdown, without the line below the header."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:1] + lines[2:]]


def shorten(title: str, tables: dict[str, str]) -> str:
    """Return the short form of a table: main metric, difference with its interval, MDD.

    Args:
        title: of a table of metrics.
        tables: all tables of the study; "TITLE: difference in METRIC from REFERENCE" has
            differences.
    """
    header, *rows = _cells(tables[title])
    kept = [n for n, name in enumerate(header) if "@" in name and " - " not in name][:3]
    head = ["configuration", "seeds"]
    added: dict[str, list[str]] = {}
    for other, table in tables.items():
        found = re.fullmatch(rf"{re.escape(title)}: difference in (\S+) from (.+)", other)
        if found:
            kept = [header.index(found[1])]
            differences = _cells(table)
            column = {name: n for n, name in enumerate(differences[0])}
            for row in differences[1:]:
                interval = f"{row[column['difference']]} {row[column['95% CI']]}"
                added[row[0]] = [interval, row[column["minimum detectable difference"]]]
            head = [
                *head,
                *(header[n] for n in kept),
                f"difference from {found[2]} [95% CI]",
                "MDD",
            ]
    if not added:
        head += [header[n] for n in kept]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for row in rows:
        empty = ["", ""] if added else []
        lines.append([*row[:2], *(row[n] for n in kept), *added.get(row[0], empty)])
    absent = tables[title].rpartition("|\n")[2]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + absent


def _short(commit: str) -> str:
    name, _, dirty = commit.partition("-")
    return f"{name[:7]}-{dirty}" if dirty else name[:7]


def _conditions(runs: pd.DataFrame, facts: dict, command: Sequence[object]) -> str:
    """What a study was made with, in a paragraph."""
    data = facts["data"]
    done = runs[(runs["status"] == "done") & runs["seconds"].notna()]  # others are tested again
    commits = ", ".join(f"`{name}`" for name in dict.fromkeys(map(_short, done["commit"])))
    devices = "; ".join(dict.fromkeys(done["device"]))
    training = format_duration(done["seconds"].sum())
    size = f"{data['users']:,} users, {data['items']:,} items, {data['events']:,} interactions"
    text = (
        f"{len(done)} trained and tested runs, {training} of training in all ({devices}); "
        f"commit{'s' * (', ' in commits)} {commits}. Data: {size}; checksum of the "
        f"interactions as read `{data['checksum'][:8]}…`. The same tables without training:"
    )
    line = f"recbole-pos compare {' '.join(map(str, command))} --report"
    return f"{textwrap.fill(text, 120)}\n\n```sh\n{line}\n```\n"


def filled(path: Path, studies: Studies) -> Page:
    """A page with its tables made again.

    Raises:
        KeyError: for a title that the study does not have.
    """
    before = path.read_text("utf-8")

    def table(found: re.Match) -> str:
        begin, name, title, old, end = found.groups()
        tables = studies.tables(name)
        if tables is None:
            return found[0]
        if title not in tables:
            raise KeyError(f"{path.name}: {name} has no table {title!r}; there are {list(tables)}")
        return f"{begin}{shorten(title, tables)}{end}"

    return Page(path, before, _TABLE.sub(table, before))


def generated(studies: Studies) -> Iterator[Page]:
    """Yield the pages of all tables and the csv files of every study with kept runs."""
    for file in sorted(RUNS.rglob("*.tar.xz")):
        name = str(file.relative_to(RUNS)).removesuffix(".tar.xz")
        if studies.tables(name) is not None:
            for text, ending in ((studies.pages[name], "md"), (studies.figures[name], "csv")):
                path = TABLES / f"{name}.{ending}"
                yield Page(path, path.read_text("utf-8") if path.is_file() else "", text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fill the tables of results/*.md.")
    parser.add_argument("pages", nargs="*", type=Path, help="all of results/ by default")
    parser.add_argument("--data_path", action="append", type=Path, default=[])
    parser.add_argument("--check", action="store_true", help="write nothing, fail if one differs")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as work:
        studies = Studies(given.data_path, Path(work))
        pages = [filled(path, studies) for path in given.pages or sorted(RESULTS.glob("*.md"))]
        if not given.pages:
            pages += generated(studies)
        for name in (name for name, tables in studies.made.items() if tables is None):
            print(f"{name}: its data are not there (--data_path); its tables stay")
    changed = [page for page in pages if page.before != page.after]
    for page in changed:
        print(f"{page.path}: {'differs' if given.check else 'written'}")
        if not given.check:
            page.path.parent.mkdir(parents=True, exist_ok=True)
            page.path.write_text(page.after, encoding="utf-8")
    return int(given.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
