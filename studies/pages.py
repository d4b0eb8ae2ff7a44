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

import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from page_parts import RESULTS, ROOT, STUDIES, make_parser, make_table, replace_tables, write_pages

import recbole_pos
from recbole_pos.study.comparing import Compared
from recbole_pos.study.plan import list_fits
from recbole_pos.study.rendered_table import RenderedTable, format_duration, format_markdown_cell
from recbole_pos.study.results import Results
from recbole_pos.study.study_file import read_plan

RUNS, TABLES = RESULTS / "runs", RESULTS / "tables"
MARK = r"(\S+) :: (.+?)"  # STUDY :: TITLE
_SHIPPED = "ml-100k"  # the dataset that RecBole's wheel contains
# Datasets that a script generates: name -> its command, run in the repository.
_GENERATED = {
    "weekly": "studies/to_rope/make_rhythm.py FOLDER",
    "bursts": "studies/to_rope/make_rhythm.py FOLDER",
    "toyshop-shuffled": "studies/positions/shuffle.py toyshop FOLDER --data_path dataset",
    "ml-100k-shuffled": "studies/positions/shuffle.py ml-100k FOLDER",
    "ml-100k-times": "studies/positions/shuffle.py ml-100k FOLDER --times",
}


class StudyTables(NamedTuple):
    """The tables of a study.

    Attributes:
        tables: title -> table.
        page: page of all its tables, in markdown.
        csv: the same figures as csv.
    """

    tables: dict[str, RenderedTable]
    page: str
    csv: str


def tabulate_study(name: str, folders: Sequence[Path], work: Path) -> StudyTables | None:
    """Return the tables of a study from the runs that are kept of it; None if its data are missing.

    Nothing is trained.

    Args:
        name: name of the study, or STUDY@DATASET for the study on another dataset.
        folders: folders where data may lie.
        work: folder for what is made on the way.

    Raises:
        UsageError: if there is no such study, or no runs of it.
    """
    study_name, _, other_dataset = name.partition("@")
    study, runs = STUDIES / f"{study_name}.yaml", RUNS / name

    # Find the data, and the files of content vectors that some configurations read.
    plan = read_plan(study)
    options = find_data(other_dataset or plan.dataset, folders, work / "data")
    vectors = {fit.options.get("item_vectors") for fit in list_fits(plan)} - {None}
    if options is None or not all(Path(file).exists() for file in vectors):
        return None

    # Make the tables without training.
    compared = recbole_pos.compare(
        str(study),
        other_dataset or None,
        config_dict=options,
        known=(runs,),
        report=True,
        run_dir=work / name.replace("/", "-"),
        verbose=False,
    )

    # The page has the command, with a word in place of a folder outside the repository.
    dataset = f" -d {other_dataset}" if other_dataset else ""
    command = f"{study.relative_to(ROOT)}{dataset} --known {runs.relative_to(ROOT)}"
    if options:
        is_own = options["data_path"] == str(ROOT / "dataset")
        command += f" --data_path {'dataset' if is_own else 'FOLDER'}"

    tables = {table.title: _select_notes(table) for table in compared.tables}
    page = _make_page(compared, tables.values(), command)
    figures = pd.read_csv(compared.folder / "table.csv")
    return StudyTables(tables, page, figures.to_csv(index=False, float_format="%.8g"))


def find_data(dataset: str, folders: Sequence[Path], generated: Path) -> dict[str, str] | None:
    """Return the option that says where the data of a dataset are; None if they are nowhere.

    Data that a script generates are generated if they are not there yet.

    Args:
        dataset: name of the dataset.
        folders: folders where data may lie, beside dataset/.
        generated: folder of generated data.

    Returns:
        ``{"data_path": folder}``; ``{}`` for the dataset that RecBole brings.
    """
    if dataset == _SHIPPED:
        return {}
    if dataset in _GENERATED and not (generated / dataset).is_dir():
        command = [sys.executable, *_GENERATED[dataset].split()]
        command[command.index("FOLDER")] = str(generated)
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    for folder in [*folders, ROOT / "dataset", generated]:
        if (folder / dataset / f"{dataset}.inter").is_file():
            return {"data_path": str(folder)}
    return None


def _select_notes(table: RenderedTable) -> RenderedTable:
    """Return a table without the configurations that were not run, which a note names.

    Of the other notes that on the split, targets and candidates stays.

    Args:
        table: any table of a study.
    """
    not_run = [line[0].text for line in table.lines if line[1].text.startswith("0 of ")]
    lines = tuple(line for line in table.lines if line[0].text not in not_run)
    notes = [f"Not run: {'; '.join(not_run)}."] if not_run else []
    notes += [note for note in table.notes if note.startswith("Protocol:")]
    return replace(table, lines=lines, notes=tuple(notes))


def _make_page(compared: Compared, tables: Iterable[RenderedTable], command: str) -> str:
    """Return the page of a study: how its runs were made, its tables, and trials of its searches.

    Args:
        compared: the study.
        tables: its tables.
        command: what follows ``recbole-pos compare`` in the command that makes the tables.
    """
    results = compared.results
    blocks = [f"# {results.plan.title}: all tables", _describe_conditions(results, command)]
    for table in tables:
        blocks += [replace(table, notes=()).markdown(), *map(_wrap, table.notes)]
    if len(results.searches):
        blocks += ["## Trials of the searches", _tabulate_trials(results.searches)]
    return "\n\n".join(block.strip("\n") for block in blocks) + "\n"


def _wrap(text: str) -> str:
    """Return a text in lines of 120 characters, which are not broken at hyphens."""
    return textwrap.fill(text, 120, break_on_hyphens=False)


def _describe_conditions(results: Results, command: str) -> str:
    """Return a paragraph on how a study's runs were made, and the command that makes its tables.

    Args:
        results: results of the study.
        command: what follows ``recbole-pos compare`` in the command.
    """
    trained, data = results.done.dropna(subset="seconds"), results.facts.data
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
    return f"{_wrap(text)}\n\n```sh\nrecbole-pos compare {command} --report\n```"


def _tabulate_trials(searches: pd.DataFrame) -> str:
    """Return a table of the trials of searches: options and validation metric, the best one first.

    Args:
        searches: a row for each trial; those without a metric are left out.
    """
    best = searches.dropna(subset="value").sort_values(["row", "value"], ascending=[True, False])
    lines = [(trial.row, trial.options, f"{trial.value:.4f}") for trial in best.itertuples()]
    return make_table(["configuration", "trial", "validation"], lines, "llr")


def shorten(table: RenderedTable) -> str:
    """Return the short form of a table of metrics in markdown.

    It has the main metric and the difference in it from the reference with its interval, or the
    first three metrics if the study has no such differences.

    Args:
        table: the table, whose column of differences is called ``METRIC - REFERENCE``.
    """
    metrics = [i for i, name in enumerate(table.columns) if "@" in name]
    differences = [i for i in metrics if " - " in table.columns[i]]
    chosen = [0, 1, *metrics[: 1 if differences else 3]]  # configuration, seeds, metrics
    head = [table.columns[i] for i in chosen]
    for i in differences:
        head.append(f"difference from {table.columns[i].partition(' - ')[2]} [95% CI]")

    lines = []
    for line in table.lines:
        cells = [format_markdown_cell(line[i]) for i in chosen]
        cells += [f"{line[i].text} {line[i].detail}".strip() for i in differences]
        lines.append(cells)
    not_run = [f"\n{_wrap(note)}\n" for note in table.notes if note.startswith("Not run")]
    return make_table(head, lines, "l" + "r" * (len(head) - 1)) + "".join(not_run)


def fill_page(path: Path, studies: Mapping[str, StudyTables | None]) -> str:
    """Return the text of a page with its tables made again; those of studies without data stay.

    Args:
        path: the page, in markdown.
        studies: name of a study -> its tables; None without its data.

    Raises:
        KeyError: for a title that the study does not have.
    """

    def make(name: str, title: str) -> str | None:
        """Return the short form of a table of a study; None without its data."""
        study = studies[name]
        if study is None:
            return None
        if title not in study.tables:
            titles = list(study.tables)
            raise KeyError(f"{path.name}: {name} has no table {title!r}; there are {titles}")
        return shorten(study.tables[title])

    return replace_tables(path, MARK, make)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the tables of pages, and write those of studies.

    With ``--check`` nothing is written.

    Args:
        arguments: the command line; by default that of the process.

    Returns:
        Exit status: 1 if ``--check`` finds a page that differs.
    """
    parser = make_parser("Fill the tables of results/*.md.")
    parser.add_argument("pages", nargs="*", type=Path, help="all of results/ by default")
    parser.add_argument("--data_path", action="append", type=Path, default=[])
    args = parser.parse_args(arguments)

    # Find the studies: those of which the pages have tables, and without PAGE all with kept runs.
    pages = args.pages or sorted(RESULTS.glob("*.md"))
    marks = [re.findall(f"<!-- begin {MARK} -->", page.read_text("utf-8")) for page in pages]
    names = [name for page_marks in marks for name, _ in page_marks]
    if not args.pages:
        names += [str(file.parent.relative_to(RUNS)) for file in sorted(RUNS.rglob("facts.json"))]
    with tempfile.TemporaryDirectory() as work:
        studies = {name: tabulate_study(name, args.data_path, Path(work)) for name in set(names)}

    # Make the text of every page: those that hold tables, and those of whole studies.
    texts = {page: fill_page(page, studies) for page in pages}
    for name, study in sorted(studies.items()):
        if study is None:
            print(f"{name}: its data are not there (--data_path); its tables stay")
        else:
            texts |= {TABLES / f"{name}.md": study.page, TABLES / f"{name}.csv": study.csv}
    return write_pages(texts, args.check)


if __name__ == "__main__":
    sys.exit(main())
