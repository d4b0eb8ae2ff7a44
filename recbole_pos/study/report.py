"""What ``compare`` and ``score`` return: the tables and charts of results, printed or written.

The modules that draw and write are imported when they are needed, since they take a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from recbole_pos.reporter import Reporter
from recbole_pos.study.rendered_table import RenderedTable
from recbole_pos.study.result_tables import make_tables, tabulate
from recbole_pos.study.results import Results, concatenate
from recbole_pos.study.statistics import ALL
from recbole_pos.values import check_choice

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Report:
    """Results of a study for people and programs: what ``compare`` and ``score`` return.

    Attributes:
        results: results of the runs, of which all tables and charts are made.
    """

    results: Results

    @cached_property
    def tables(self) -> list[RenderedTable]:
        """The tables as people read them; the first is the text of this object."""
        return make_tables(self.results)

    @cached_property
    def table(self) -> pd.DataFrame:
        """One line per configuration and metric: mean and standard deviation over seeds.

        Lines of the first metric also have the difference from the reference, if the runs have
        saved the ranks of their test targets.
        """
        frame = tabulate(self.results.comparisons)
        return frame[frame["bin"] == ALL].drop(columns="bin").reset_index(drop=True)

    @cached_property
    def pairs(self) -> pd.DataFrame:
        """One line per configuration: difference from the reference, interval, p-value, star."""
        return concatenate([comparison.differences for comparison in self.results.comparisons])

    def plot(self, kind: str = "differences") -> Figure:
        """Draw one chart of the first table of the study.

        Args:
            kind: ``differences`` (from the reference, with 95% intervals); ``seconds`` or
                ``parameters`` (the first metric against training time or model size); or ``curves``
                (validation by epoch).

        Returns:
            The matplotlib figure.

        Raises:
            UsageError: for another kind, or for a kind that the results have no values for.
        """
        from recbole_pos.study.study_report import draw_charts  # here, since it imports matplotlib

        charts = draw_charts(self.results, self.results.comparisons[0])  # those that have values
        figures = {chart.kind: chart.figure for chart in charts}
        check_choice("kind", kind, tuple(figures))
        return figures[kind]

    def show(self, reporter: Reporter) -> None:
        """Print the tables in the width of the terminal, and warnings about the data and runs."""
        for table in self.tables:
            reporter.line(table)
            reporter.line("")
        for text in self.results.facts.warnings:
            reporter.warning(text)

    def write(self, folder: str | Path, latex: bool = True) -> list[Path]:
        """Write table.md, table.csv, runs.csv and report.html into a folder.

        Args:
            folder: the folder, which is made if it does not exist.
            latex: whether files for a paper are written as well: table.tex, and a pdf for each
                chart.

        Returns:
            Paths of the files.
        """
        from recbole_pos.study.study_report import write_results  # here, since it takes a second

        return write_results(self.results, Path(folder), latex)

    def __repr__(self) -> str:
        return self.tables[0].markdown()

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in self.tables)
