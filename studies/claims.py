"""Judge the papers' claims in results/claims.yaml by the tables of results/.

    python studies/claims.py [--check]

Fills the tables between ``<!-- begin claims: PART -->`` and ``<!-- end -->`` of results/README.md,
whose words say what a verdict means, and draws results/claims.png. All differences are in percent
of the figure they are measured from, here and in the paper, so that levels need not be the same.
Figures are those of results/tables/; nothing is computed again.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import pandas as pd
import yaml
from matplotlib.figure import Figure
from page_parts import RESULTS, make_parser, make_table, replace_tables, write_pages

from recbole_pos.study.result_tables import format_metric

CLAIMS = RESULTS / "claims.yaml"
METRIC = "ndcg@10"  # of a claim that names none
DEMONSTRATIONS = "demonstrations"  # the key of differences on generated data
# Verdict -> its color in the picture, also of verdicts that begin with it.
COLORS = {
    "replicated": "#0072B2",
    "not replicated": "#E69F00",
    "contradicted": "#D55E00",
    "inconclusive": "#7F7F7F",
}
_FARTHEST = 30.0  # percent in the picture, beyond which it is cut off


class Measured(NamedTuple):
    """A difference between two configurations, in percent of the second.

    Attributes:
        difference: the first minus the second.
        low: lower end of the 95% confidence interval.
        high: its upper end.
        is_significant: whether p is below 0.05 after Holm's correction.
        seed_noise: "own"; "pooled", if one of the two has one seed and takes the noise of other
            configurations; or "unknown", if no configuration has several seeds.
    """

    difference: float
    low: float
    high: float
    is_significant: bool
    seed_noise: str

    def __str__(self) -> str:
        """Return the difference with its interval."""
        difference, low, high = map(format_percent, (self.difference, self.low, self.high))
        return f"{difference}% [{low}, {high}]"


class Test(NamedTuple):
    """A test of a claim on a dataset.

    Attributes:
        paper: the paper that makes the claim, or DEMONSTRATIONS.
        claim: the claim in words.
        data: the dataset.
        page: page of results.
        is_papers: whether the dataset is one on which the paper makes the claim.
        effects: the paper's differences in percent, the smallest first: the one on this dataset, or
            else all of them. Those are left out for which the paper gives no number.
        measured: the difference here.
        verdict: the judgement in words.
    """

    paper: str
    claim: str
    data: str
    page: str
    is_papers: bool
    effects: list[float]
    measured: Measured
    verdict: str


def format_percent(value: float) -> str:
    """Return a signed number of percent with one decimal, with two below 0.1."""
    text = f"{value:+.{2 if abs(value) < 0.1 else 1}f}"
    return "0.0" if float(text) == 0 else text


def judge(measured: Measured, paper: Sequence[float], expects: str = "better") -> str:
    """Return the verdict on a claim; results/README.md has the rule.

    A significant difference decides by its direction; it is smaller if the paper's differences all
    lie above the confidence interval. Without one, the claim is not replicated if
    all of the paper's differences lie outside the confidence interval, and else the test is
    inconclusive.

    Args:
        measured: the difference here; positive supports the claim.
        paper: the paper's differences, on this dataset or else on all of its datasets.
        expects: better, or same, for a claim of a small or no effect.
    """
    if measured.is_significant and expects != "same":
        if measured.difference < 0:
            return "contradicted"
        is_smaller = bool(paper) and measured.high < min(paper)
        return "replicated, smaller" if is_smaller else "replicated"

    # Without any noise of seeds an interval is too narrow to exclude the paper's difference; one
    # that is all positive supports the claim, however large the paper's difference is.
    is_excluded = bool(paper) and not any(measured.low <= x <= measured.high for x in paper)
    supports = measured.low > 0 and expects != "same"
    if is_excluded and not supports and measured.seed_noise != "unknown":
        return "not replicated"
    return "inconclusive"


def measure(results: Path, table: str, metric: str, row: str, base: str) -> Measured:
    """Return the difference between two configurations, in percent, that a table of results has.

    A table has it in one direction; for the other one, signs are turned.

    Args:
        results: folder of results.
        table: ``STUDY :: TITLE``, the study's file and the title of a table in it.
        metric: the metric.
        row: the configuration that is compared.
        base: the configuration that it is compared with, whose metric is 100%.

    Raises:
        KeyError: if the table has no such difference in either direction.
    """
    study, _, title = table.partition(" :: ")
    lines = pd.read_csv(results / "tables" / f"{study}.csv")
    lines = lines.query("table == @title and metric == @metric and bin == 'all targets'")
    lines = lines.set_index("row")
    if lines["reference"].get(row) == base:
        sign, line = 1, lines.loc[row]
    elif lines["reference"].get(base) == row:
        sign, line = -1, lines.loc[base]
    else:
        raise KeyError(f"{table} has no difference in {metric} between {row} and {base}")

    percent = sign * 100 / lines.loc[base, "mean"]
    low, high = sorted((percent * line["low"], percent * line["high"]))
    is_significant = line["star"] in (True, "True")  # text, where a column has empty cells
    return Measured(percent * line["difference"], low, high, is_significant, line["seed_noise"])


def read_claims(file: Path, results: Path) -> list[Test]:
    """Return the tests of all claims, paper by paper, with what the tables of results say of them.

    Args:
        file: yaml file of the claims.
        results: folder of results.
    """
    papers = yaml.safe_load(file.read_text("utf-8"))
    # A demonstration is a claim and its only test in one.
    shown = [{**test, "here": [test]} for test in papers.pop(DEMONSTRATIONS, [])]
    return [
        _read_test(test, claim, paper, results)
        for paper, claims in {**papers, DEMONSTRATIONS: shown}.items()
        for claim in claims
        for test in claim["here"]
    ]


def _read_test(
    test: Mapping[str, Any], claim: Mapping[str, Any], paper: str, results: Path
) -> Test:
    """Return one test of a claim, with its verdict.

    Args:
        test: what the yaml file says of the test: the dataset, where the difference stands, a note.
        claim: what the file says of the claim: its words, its metric, the paper's figures, of which
            a pair (ours, base) is a difference in percent, and what it expects.
        paper: the paper, or DEMONSTRATIONS.
        results: folder of results.
    """
    metric, figures = claim.get("metric", METRIC), claim.get("paper", {})
    is_papers = test["data"] in figures
    pairs = [figures[test["data"]]] if is_papers else figures.values()
    effects = sorted(100 * (pair[0] / pair[1] - 1) for pair in pairs if pair is not None)

    measured = measure(results, test["table"], metric, test["row"], test["from"])
    verdict = judge(measured, effects, claim.get("expects", "better"))
    if measured.seed_noise != "own":
        verdict += " (seed noise unknown)" if measured.seed_noise == "unknown" else " (one seed)"
    if test.get("note"):
        verdict += f" {test['note']}"
    words = claim["claim"] + ("" if metric == METRIC else f" ({format_metric(metric)})")
    return Test(paper, words, test["data"], test["page"], is_papers, effects, measured, verdict)


def tabulate(tests: Sequence[Test], part: str) -> str:
    """Return a table of tests in markdown, paper by paper.

    The words of a claim stand in the first of its rows only.

    Args:
        tests: all tests.
        part: "the papers' data", "other data" or "generated data".
    """
    lines: list[list[str]] = []
    paper = claim = ""  # of the test before
    for test in tests:
        if not belongs_to(test, part):
            continue
        if test.paper not in (paper, DEMONSTRATIONS):
            lines.append([f"**{test.paper}**"])
        words = "" if (test.paper, test.claim) == (paper, claim) else test.claim
        paper, claim = test.paper, test.claim
        lines.append([words, f"[{test.data}]({test.page})", *_make_last_cells(test)])

    if part == "generated data":
        head = ["difference", "data", "here [95% CI]", "significant"]
        return make_table(head, lines, "llrl")
    return make_table(["claim", "data", "paper", "here [95% CI]", "verdict"], lines, "llrrl")


def belongs_to(test: Test, part: str) -> bool:
    """Return whether a test stands in a part of the page.

    Args:
        test: the test.
        part: "the papers' data", "other data", which has only tests with a clear verdict, or
            "generated data".
    """
    if test.paper == DEMONSTRATIONS:
        return part == "generated data"
    if test.is_papers:
        return part == "the papers' data"
    return part == "other data" and not test.verdict.startswith("inconclusive")


def _make_last_cells(test: Test) -> list[str]:
    """Return the last cells of a test: the paper's differences, the one here and the verdict.

    A demonstration has no paper, and in place of a verdict whether it is significant. The paper's
    differences are one, or the range of several, or ``no number``.
    """
    here = str(test.measured)
    if test.paper == DEMONSTRATIONS:
        return [here, "yes" if test.measured.is_significant else "no"]
    # A dict keeps the two ends in order, and only one of them if they read the same.
    ends = dict.fromkeys(map(format_percent, [*test.effects[:1], *test.effects[-1:]]))
    return [f"{' to '.join(ends)}%" if ends else "no number", here, test.verdict]


def draw(tests: Sequence[Test], file: Path) -> None:
    """Draw the tests on real data: the difference with its interval, and the paper's beside it.

    Args:
        tests: all tests, of which those are drawn for which the paper gives a number.
        file: the picture to write.
    """
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(layout="constrained")
        axis = figure.subplots()
        names: list[str] = []  # from top to bottom: that of each paper, then those of its tests
        for test in tests:
            if not test.effects:  # as of a demonstration
                continue
            if test.paper not in names:
                names.append(test.paper)
            place, found = len(names), test.measured
            names.append(f"{test.claim}: {test.data}")
            color = next(color for name, color in COLORS.items() if test.verdict.startswith(name))
            ends = [[found.difference - found.low], [found.high - found.difference]]
            axis.errorbar(found.difference, place, xerr=ends, fmt="o", color=color, markersize=5)
            axis.plot(test.effects, [place] * len(test.effects), "Dk", mfc="none", markersize=4)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_yticks(range(len(names)), names)
        for label in axis.get_yticklabels():
            if any(label.get_text() == test.paper for test in tests):
                label.set_fontweight("bold")
        axis.tick_params(axis="y", length=0)
        axis.set(xlim=(-_FARTHEST, _FARTHEST), ylim=(len(names) - 0.4, -0.6))
        axis.set_xlabel("difference in percent; to the right the claim is supported")
        for name, color in COLORS.items():
            axis.plot([], [], "o-", color=color, label=name, markersize=5)
        axis.plot([], [], "Dk", mfc="none", label="the paper", markersize=4)
        axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=5, frameon=False)
        axis.grid(axis="x", alpha=0.3)
        axis.spines[["top", "right", "left"]].set_visible(False)
        figure.set_size_inches(9.0, 1.0 + 0.21 * len(names))
        figure.savefig(file, dpi=130)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables of claims and the picture; with ``--check`` nothing is written.

    Args:
        arguments: the command line; by default that of the process.

    Returns:
        Exit status: 1 if ``--check`` finds that a table differs.
    """
    args = make_parser("Judge the papers' claims by results/tables/.").parse_args(arguments)
    tests = read_claims(CLAIMS, RESULTS)
    if not args.check:
        draw(tests, RESULTS / "claims.png")
    page = RESULTS / "README.md"
    text = replace_tables(page, "claims: (.+?)", lambda part: tabulate(tests, part))
    return write_pages({page: text}, args.check)


if __name__ == "__main__":
    sys.exit(main())
