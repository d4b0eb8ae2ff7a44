"""Files of a comparison for a paper: its tables in LaTeX, its figures as pdf.

In: the results of a study. Out: ``table.tex``, which needs the package booktabs, and a pdf for each
chart. All numbers are also in ``table.csv``.
"""

from __future__ import annotations

from pathlib import Path

from recbole_pos.experiment.folder import make_folder
from recbole_pos.files import atomic_write, write_text
from recbole_pos.study.rendered_table import Cell, RenderedTable
from recbole_pos.study.result_tables import make_tables
from recbole_pos.study.results import Results
from recbole_pos.study.study_report import draw_charts

# Character -> LaTeX that prints it.
_LATEX = str.maketrans(
    {
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
        **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
        **{"±": r"$\pm$", "<": "$<$", ">": "$>$", "†": r"$\dagger$", "‡": r"$\ddagger$"},
        **{"\N{NO-BREAK SPACE}": "~", "\N{MINUS SIGN}": "$-$"},
    }
)


def write_paper_files(results: Results, folder: Path) -> list[Path]:
    """Write the tables of a study in LaTeX, and each of its charts as pdf.

    Args:
        results: results of the study.
        folder: folder to write into, which is made if it does not exist.

    Returns:
        Paths of table.tex and of the pdf files. With several tables in a study, the names of the
        pdf files end with the number of the table.
    """
    # All tables in one file.
    make_folder(folder)
    text = "\n\n".join(render_latex(table) for table in make_tables(results))
    files = [folder / "table.tex"]
    write_text(files[0], f"% needs \\usepackage{{booktabs}}\n{text}\n")

    # A file for each chart. A comparison has the numbers of one table. Without a date, the same
    # results give the same bytes.
    for number, comparison in enumerate(results.comparisons, 1):
        for chart in draw_charts(results, comparison):
            suffix = f"-{number}" if len(results.comparisons) > 1 else ""
            file = folder / f"{chart.kind}{suffix}.pdf"
            # The file appears only when it is complete, so a kill leaves no broken one.
            with atomic_write(file, text=False) as unfinished:
                chart.figure.savefig(unfinished, format="pdf", metadata={"CreationDate": None})
            files.append(file)
    return files


def render_latex(table: RenderedTable) -> str:
    """Return a table in LaTeX, for the package booktabs.

    The best values are bold, and the notes of the table are in its caption.

    Args:
        table: the table as people read it: lines of cells, each with a text and perhaps a detail.
    """
    # Columns of words are aligned left, numbers right. _LATEX escapes what LaTeX would interpret.
    alignment = "".join("l" if i in table.text_columns else "r" for i in range(len(table.columns)))
    lines = [" & ".join(map(_format_cell, line)) for line in table.lines]
    caption = " ".join([f"{table.title}.", *table.notes]).translate(_LATEX)
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{caption}}}",
            rf"\begin{{tabular}}{{{alignment}}}",
            r"\toprule",
            " & ".join(name.translate(_LATEX) for name in table.columns) + r" \\",
            r"\midrule",
            *(rf"{line} \\" for line in lines),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


def _format_cell(cell: Cell) -> str:
    """Return a cell in LaTeX, with its detail in small letters."""
    text, detail = cell.text.translate(_LATEX), cell.detail.translate(_LATEX)
    # A row that begins with [ or * would be read as an argument of the \\ before it, so every text
    # is in braces.
    text = rf"\textbf{{{text}}}" if cell.bold and text else text
    return rf"{text} {{\scriptsize {detail}}}".strip() if detail else f"{{{text}}}"
