"""Fill the tables of results/ from the runs that are kept in results/runs/.

    python studies/pages.py [--data_path FOLDER]... [--check] [PAGE ...]

For each study with kept runs, results/tables/STUDY.md has all tables that ``recbole-pos compare
studies/STUDY.yaml --known results/runs/STUDY`` makes, with the trials of its searches, the
conditions of its runs and the command; results/tables/STUDY.csv has the figures. In a page of
results, ``<!-- begin STUDY :: TITLE -->`` to ``<!-- end -->`` is the short form of one of these
tables: its main metric and the differences. STUDY@DATASET is the study with ``-d DATASET``.

With PAGE, only that page and its studies. Nothing is trained. Data come from the folders given,
from dataset/, or from the scripts that generate them; without them, or without the content vectors
of a study, a table stays as it is.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from page_parts import RESULTS, ROOT, STUDIES, make_table, write_pages

import recbole_pos
from recbole_pos.study.collecting import collect_results
from recbole_pos.study.plan import list_fits
from recbole_pos.study.rendered_table import format_duration
from recbole_pos.study.study_file import read_plan
from recbole_pos.study.study_folder import StudyFolder

RUNS, TABLES = RESULTS / "runs", RESULTS / "tables"
_TABLE = re.compile(r"(<!-- begin (\S+) :: (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
# Row of a configuration none of whose runs is done.
_NOT_RUN = re.compile(r"^\| (.+?) \| 0 of \d+ \|.*\n", re.MULTILINE)
_SHIPPED = "ml-100k"  # the dataset that RecBole's wheel contains
# Datasets that a script generates: name -> its command, to which the folder is added.
_GENERATED = {
    "weekly": [STUDIES / "to_rope/make_rhythm.py", "{folder}"],
    "bursts": [STUDIES / "to_rope/make_rhythm.py", "{folder}"],
    "toyshop-shuffled": [
        *(STUDIES / "positions/shuffle.py", "toyshop", "{folder}"),
        *("--data_path", ROOT / "dataset"),
    ],
    "ml-100k-shuffled": [STUDIES / "positions/shuffle.py", "ml-100k", "{folder}"],
    "ml-100k-times": [STUDIES / "positions/shuffle.py", "ml-100k", "{folder}", "--times"],
}


class StudyTables(NamedTuple):
    """The tables of a study.

    Attributes:
        tables: title -> table in markdown.
        page: page of all its tables, in markdown.
        csv: the same figures as csv.
    """

    tables: dict[str, str]
    page: str
    csv: str


class Studies:
    """Tables of studies, each of which is made once, when it is first asked for.

    Args:
        folders: folders where data may lie.
        work: an empty folder.

    Attributes:
        folders: all folders that are searched for data.
        work: folder for what is made on the way.
        made: study -> its tables; None without its data.
    """

    def __init__(self, folders: Sequence[Path], work: Path) -> None:
        self.folders = [*folders, ROOT / "dataset", work / "data"]
        self.work = work
        self.made: dict[str, StudyTables | None] = {}

    def tables(self, name: str) -> StudyTables | None:
        """Return the tables of a study; None if its data are not there.

        Args:
            name: name of the study, or STUDY@DATASET for the study on another dataset.

        Raises:
            FileNotFoundError: if there is no such study, or no runs of it.
        """
        if name not in self.made:
            self.made[name] = self._compare(name)
        return self.made[name]

    def _compare(self, name: str) -> StudyTables | None:
        """Make the tables of a study from the runs that are kept of it; None if it lacks its data.

        Nothing is trained.

        Args:
            name: name of the study, or STUDY@DATASET.

        Raises:
            FileNotFoundError: if there is no such study, or no runs of it.
        """
        study_name, _, other_dataset = name.partition("@")
        study, runs = STUDIES / f"{study_name}.yaml", RUNS / name
        for file in (study, runs):
            if not file.exists():
                raise FileNotFoundError(f"{name}: there is no {file.relative_to(ROOT)}")

        # Find the data, and the files of content vectors that some configurations read.
        plan = read_plan(study)
        options = self._find_data(other_dataset or plan.dataset)
        vectors = {fit.options.get("item_vectors") for fit in list_fits(plan)} - {None}
        if options is None or not all(map(os.path.exists, vectors)):
            return None

        # Make the tables without training.
        folder = self.work / name.replace("/", "-")
        found = recbole_pos.compare(
            str(study),
            other_dataset or None,
            config_dict=options,
            known=(runs,),
            report=True,
            run_dir=folder,
            verbose=False,
        )

        # The page has the command, with a word in place of a folder outside the repository.
        command = [str(study.relative_to(ROOT)), *(["-d", other_dataset] if other_dataset else [])]
        command += ["--known", str(runs.relative_to(ROOT))]
        if options:
            is_own = options["data_path"] == str(ROOT / "dataset")
            command += ["--data_path", "dataset" if is_own else "FOLDER"]
        return _read_tables(StudyFolder(folder), found.runs, command)

    def _find_data(self, dataset: str) -> dict[str, str] | None:
        """Return the option that says where the data of a dataset are; None if they are nowhere.

        Data that a script generates are generated if they are not there yet.

        Args:
            dataset: name of the dataset.

        Returns:
            ``{"data_path": folder}``; ``{}`` for the dataset that RecBole brings.
        """
        if dataset == _SHIPPED:
            return {}
        generated = self.work / "data"
        if dataset in _GENERATED and not (generated / dataset).is_dir():
            command = [str(word).format(folder=generated) for word in _GENERATED[dataset]]
            subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        for folder in self.folders:
            if (folder / dataset / f"{dataset}.inter").is_file():
                return {"data_path": str(folder)}
        return None


def _read_tables(folder: StudyFolder, runs: pd.DataFrame, command: list[str]) -> StudyTables:
    """Return the tables that ``recbole_pos.compare`` has written into a study's folder.

    Args:
        folder: the study's folder.
        runs: a row for each run of the study.
        command: what follows ``recbole-pos compare`` in the command that makes the tables.
    """
    plan, facts = folder.read_plan(), folder.read_facts()
    assert plan is not None
    markdown = (folder.path / "table.md").read_text("utf-8")

    # Split at the headings; after what stands before the first, title and text alternate.
    _, *titles_and_texts = re.split(r"^## (.+)\n", markdown, flags=re.MULTILINE)
    texts = dict(zip(titles_and_texts[::2], titles_and_texts[1::2], strict=True))
    tables = {title: _only_table(text) for title, text in texts.items()}

    # The page has each table with its note, the trials of searches, and how runs were made.
    sections = {title: tables[title] + _find_protocol(text) for title, text in texts.items()}
    trials = collect_results(plan, folder).searches
    if len(trials):
        sections["Trials of the searches"] = _tabulate_trials(trials)
    text = "\n".join(f"## {title}\n\n{table}" for title, table in sections.items())
    conditions = _describe_conditions(runs, facts.data, command)
    page = f"# {plan.title}: all tables\n\n{conditions}\n{text}"

    table = pd.read_csv(folder.path / "table.csv")
    return StudyTables(tables, page, table.to_csv(index=False, float_format="%.8g"))


def _only_table(text: str) -> str:
    """Return the table in a section, with the names of configurations that were not run below it.

    Args:
        text: section of a study's page, in markdown, of which only lines of a table are kept.
    """
    table = "".join(line for line in text.splitlines(keepends=True) if line.startswith("|"))
    not_run = "; ".join(_NOT_RUN.findall(table))
    note = textwrap.fill(f"Not run: {not_run}.", 120, break_on_hyphens=False)
    return _NOT_RUN.sub("", table) + (f"\n{note}\n" if not_run else "")


def _find_protocol(text: str) -> str:
    """Return the note of a section on its split, targets and candidates; empty without one.

    Args:
        text: section of a study's page, in markdown.
    """
    notes = [
        line.removeprefix("- ") for line in text.splitlines() if line.startswith("- Protocol:")
    ]
    return "".join(f"\n{textwrap.fill(note, 120)}\n" for note in notes)


def _tabulate_trials(searches: pd.DataFrame) -> str:
    """Return a table of the trials of searches: options and validation metric, the best one first.

    Args:
        searches: a row for each trial; those without a metric are left out.
    """
    best = searches.dropna(subset="value").sort_values(["row", "value"], ascending=[True, False])
    lines = [(trial.row, trial.options, f"{trial.value:.4f}") for trial in best.itertuples()]
    return make_table(["configuration", "trial", "validation"], lines, "llr")


def _read_cells(table: str) -> list[list[str]]:
    """Return the cells of a table in markdown, row by row and the header first."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:1] + lines[2:]]


def shorten(title: str, tables: dict[str, str]) -> str:
    """Return the short form of a table of metrics.

    It has the main metric and the difference in it from the reference with its interval, or the
    first three metrics if the study has no such differences.

    Args:
        title: title of a table of metrics.
        tables: all tables of the study; "TITLE: difference in METRIC from REFERENCE" has
            differences.
    """
    # Choose columns of metrics: without differences these three.
    header, *rows = _read_cells(tables[title])
    columns = [i for i, name in enumerate(header) if "@" in name and " - " not in name][:3]
    difference_names: list[str] = []
    differences: dict[str, str] = {}  # configuration -> difference with its interval

    # Look for a table of differences that belongs to this one.
    for other, table in tables.items():
        match = re.fullmatch(rf"{re.escape(title)}: difference in (\S+) from (.+)", other)
        if not match:
            continue
        metric, reference = match.groups()
        columns = [header.index(metric)]
        difference_names = [f"difference from {reference} [95% CI]"]
        names, *lines = _read_cells(table)
        for line in lines:
            cells = dict(zip(names, line, strict=True))
            differences[line[0]] = f"{cells['difference']} {cells['95% CI']}"

    # Put both together. The note on configurations that were not run follows the table's last row.
    head = ["configuration", "seeds", *(header[i] for i in columns), *difference_names]
    lines = []
    for row in rows:
        difference = [differences.get(row[0], "")] * len(difference_names)
        lines.append([*row[:2], *(row[i] for i in columns), *difference])
    not_run = tables[title].rpartition("|\n")[2]
    return make_table(head, lines, "l" + "r" * (len(head) - 1)) + not_run


def _describe_conditions(runs: pd.DataFrame, data: Mapping[str, Any], command: list[str]) -> str:
    """Return a paragraph on how a study's runs were made, and the command that makes its tables.

    Args:
        runs: a row for each run of the study.
        data: numbers of users, items and interactions, and a checksum.
        command: what follows ``recbole-pos compare`` in the command.
    """
    trained = runs[(runs["status"] == "done") & runs["seconds"].notna()]
    # A commit is a hash, perhaps with ``-dirty``; 7 digits of the hash will do.
    commits = dict.fromkeys(re.sub(r"^(.{7})[^-]*", r"\1", name) for name in trained["commit"])
    devices = "; ".join(dict.fromkeys(trained["device"]))
    seconds = format_duration(trained["seconds"].sum())
    size = f"{data['users']:,} users, {data['items']:,} items, {data['events']:,} interactions"
    text = (
        f"{len(trained)} trained and tested runs, {seconds} of training in all ({devices}); "
        f"commit{'s' * (len(commits) > 1)} {', '.join(f'`{name}`' for name in commits)}. Data: "
        f"{size}; checksum of the interactions as read `{data['checksum'][:8]}…`. The same tables "
        "without training:"
    )
    line = f"recbole-pos compare {' '.join(command)} --report"
    return f"{textwrap.fill(text, 120)}\n\n```sh\n{line}\n```\n"


def fill_page(path: Path, studies: Studies) -> str:
    """Return the text of a page with its tables made again; those of studies without data stay.

    Args:
        path: the page, in markdown.
        studies: makes the tables.

    Raises:
        KeyError: for a title that the study does not have.
    """

    def make_again(match: re.Match) -> str:
        """Return the marks of a table, with the table made again between them."""
        begin, name, title, _, end = match.groups()
        study = studies.tables(name)
        if study is None:
            return match[0]
        if title not in study.tables:
            titles = list(study.tables)
            raise KeyError(f"{path.name}: {name} has no table {title!r}; there are {titles}")
        return f"{begin}{shorten(title, study.tables)}{end}"

    return _TABLE.sub(make_again, path.read_text("utf-8"))


def list_packed() -> list[str]:
    """Return the names of all studies of which runs are kept."""
    return [str(file.parent.relative_to(RUNS)) for file in sorted(RUNS.rglob("facts.json"))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the tables of pages, and write those of studies.

    With ``--check`` nothing is written.

    Args:
        arguments: the command line; by default that of the process.

    Returns:
        Exit status: 1 if ``--check`` finds a page that differs.
    """
    parser = argparse.ArgumentParser(description="Fill the tables of results/*.md.")
    parser.add_argument("pages", nargs="*", type=Path, help="all of results/ by default")
    parser.add_argument("--data_path", action="append", type=Path, default=[])
    parser.add_argument("--check", action="store_true", help="write nothing, fail if one differs")
    args = parser.parse_args(arguments)

    # Make the text of every page: those that hold tables, and those of whole studies.
    with tempfile.TemporaryDirectory() as work:
        studies = Studies(args.data_path, Path(work))
        pages = args.pages or sorted(RESULTS.glob("*.md"))
        texts = {path: fill_page(path, studies) for path in pages}
        for name in list(studies.made) if args.pages else list_packed():
            study = studies.tables(name)
            if study is None:
                print(f"{name}: its data are not there (--data_path); its tables stay")
            else:
                texts |= {TABLES / f"{name}.md": study.page, TABLES / f"{name}.csv": study.csv}

    return write_pages(texts, args.check)


if __name__ == "__main__":
    sys.exit(main())
