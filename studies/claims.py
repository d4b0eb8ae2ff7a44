"""Judge the papers' claims in results/claims.yaml by the tables of results/.

    python studies/claims.py [--check]

Fills the tables between ``<!-- begin claims: PART -->`` and ``<!-- end -->`` of results/README.md,
whose words say what a verdict means, and draws results/claims.png. All differences are in percent
of the figure they are measured from, here and in the paper, so that levels need not be the same.
Figures are those of results/tables/; nothing is computed again.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import pandas as pd
import yaml
from matplotlib.figure import Figure
from page_parts import RESULTS, make_table, write_pages

from recbole_pos.study.result_tables import format_metric

CLAIMS = RESULTS / "claims.yaml"
METRIC = "ndcg@10"  # of a claim that names none
DEMONSTRATIONS = "demonstrations"  # the key of differences on generated data
REPLICATED, SMALLER = "replicated", "replicated, smaller"
CONTRADICTED = "contradicted"
NOT_REPLICATED, INCONCLUSIVE = "not replicated", "inconclusive"
# Verdict -> its color in the picture, also of verdicts that begin with it.
COLORS = {
    REPLICATED: "#0072B2",
    NOT_REPLICATED: "#E69F00",
    CONTRADICTED: "#D55E00",
    INCONCLUSIVE: "#7F7F7F",
}
_TABLE = re.compile(r"(<!-- begin claims: (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_FARTHEST = 30.0  # percent in the picture, beyond which it is cut off


class Measured(NamedTuple):
    """A difference between two configurations, in percent of the second.

    Attributes:
        difference: the first minus the second.
        low: lower end of the 95% confidence interval.
        high: its upper end.
        detectable: the smallest true difference that 80% of such studies would detect.
        is_significant: whether p is below 0.05 after Holm's correction.
        seed_noise: "own"; "pooled", if one of the two has one seed and takes the noise of other
            configurations; or "unknown", if no configuration has several seeds.
    """

    difference: float
    low: float
    high: float
    detectable: float
    is_significant: bool
    seed_noise: str

    def __str__(self) -> str:
        """Return the difference with its interval."""
        interval = f"[{format_percent(self.low)}, {format_percent(self.high)}]"
        return f"{format_percent(self.difference)}% {interval}"


class Test(NamedTuple):
    """A test of a claim on a dataset.

    Attributes:
        claim: the claim in words.
        data: the dataset.
        page: page of results.
        paper: dataset of the paper -> its difference in percent, None where it gives no number.
        measured: the difference here.
        verdict: the judgement in words; empty for a demonstration.
    """

    claim: str
    data: str
    page: str
    paper: Mapping[str, float | None]
    measured: Measured
    verdict: str

    @property
    def is_papers(self) -> bool:
        """Whether the dataset is one on which the paper makes the claim."""
        return self.data in self.paper

    @property
    def effects(self) -> list[float]:
        """The paper's differences in percent: the one on this dataset, or else all of them."""
        own = [self.paper[self.data]] if self.is_papers else self.paper.values()
        return sorted(effect for effect in own if effect is not None)


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
            return CONTRADICTED
        is_smaller = bool(paper) and measured.high < min(paper)
        return SMALLER if is_smaller else REPLICATED

    # Without any noise of seeds an interval is too narrow to exclude the paper's difference; one
    # that is all positive supports the claim, however large the paper's difference is.
    is_excluded = bool(paper) and not any(measured.low <= x <= measured.high for x in paper)
    supports = measured.low > 0 and expects != "same"
    if is_excluded and not supports and measured.seed_noise != "unknown":
        return NOT_REPLICATED
    return INCONCLUSIVE


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
    pairs = lines.set_index(["row", "reference"]).sort_index()
    if (row, base) in pairs.index:
        sign, line = 1, pairs.loc[(row, base)]
    elif (base, row) in pairs.index:
        sign, line = -1, pairs.loc[(base, row)]
    else:
        raise KeyError(f"{table} has no difference in {metric} between {row} and {base}")

    percent = 100 / lines.loc[lines["row"] == base, "mean"].iloc[0]
    low, high = sorted((sign * percent * line["low"], sign * percent * line["high"]))
    return Measured(
        sign * percent * line["difference"],
        low,
        high,
        percent * line["detectable"],
        line["star"] in (True, "True"),  # text, where a column has empty cells
        line["seed_noise"],
    )


def read_claims(file: Path, results: Path) -> dict[str, list[Test]]:
    """Return the claims of each paper, with what the tables of results say of them.

    Args:
        file: yaml file of the claims.
        results: folder of results.

    Returns:
        paper -> tests of its claims; differences on generated data, which judge no paper, are under
        the key DEMONSTRATIONS.
    """
    papers = yaml.safe_load(file.read_text("utf-8"))
    shown = papers.pop(DEMONSTRATIONS, [])
    tests = {
        paper: [_read_test(test, claim, results) for claim in claims for test in claim["here"]]
        for paper, claims in papers.items()
    }
    demonstrations = [_read_test(test, test, results) for test in shown]
    tests[DEMONSTRATIONS] = [test._replace(verdict="") for test in demonstrations]
    return tests


def _read_test(test: Mapping[str, Any], claim: Mapping[str, Any], results: Path) -> Test:
    """Return one test of a claim, with its verdict.

    Args:
        test: what the yaml file says of the test: the dataset, where the difference stands, a note.
        claim: what the file says of the claim: its words, its metric, the paper's figures, of which
            a pair (ours, base) is a difference in percent, and what it expects.
        results: folder of results.
    """
    metric = claim.get("metric", METRIC)
    paper = {
        name: None if pair is None else 100 * (pair[0] / pair[1] - 1)
        for name, pair in claim.get("paper", {}).items()
    }

    measured = measure(results, test["table"], metric, test["row"], test["from"])
    named = "" if metric == METRIC else f" ({format_metric(metric)})"
    found = Test(claim["claim"] + named, test["data"], test["page"], paper, measured, "")
    verdict = judge(measured, found.effects, claim.get("expects", "better"))
    if measured.seed_noise != "own":
        verdict += " (one seed each)" if measured.seed_noise == "unknown" else " (one seed)"
    if test.get("note"):
        verdict += f" {test['note']}"
    return found._replace(verdict=verdict)


def tabulate(papers: Mapping[str, Sequence[Test]], part: str) -> str:
    """Return a table of tests in markdown, paper by paper.

    The words of a claim stand in the first of its rows only.

    Args:
        papers: paper -> tests of its claims.
        part: "the papers' data", "other data" or "generated data".
    """
    is_generated = part == "generated data"
    head = ["claim", "data", "paper", "here [95% CI]", "verdict"]
    if is_generated:
        head = ["difference", "data", "here [95% CI]", "significant"]
    lines: list[list[str]] = []
    for paper, tests in papers.items():
        if (paper == DEMONSTRATIONS) != is_generated:
            continue
        chosen = [test for test in tests if belongs_to(test, part)]
        if chosen and not is_generated:
            lines.append([f"**{paper}**"])

        before = ""
        for test in chosen:
            claim = "" if test.claim == before else test.claim
            before = test.claim
            data, here = f"[{test.data}]({test.page})", str(test.measured)
            if is_generated:
                is_significant = "yes" if test.measured.is_significant else "no"
                lines.append([claim, data, here, is_significant])
            else:
                lines.append([claim, data, _describe_effects(test.effects), here, test.verdict])

    return make_table(head, lines, "llrl" if is_generated else "llrrl")


def belongs_to(test: Test, part: str) -> bool:
    """Return whether a test stands in a part of the page.

    Args:
        test: the test.
        part: "the papers' data", "other data", which has only tests with a clear verdict, or
            "generated data".
    """
    if part == "other data":
        return not test.is_papers and not test.verdict.startswith(INCONCLUSIVE)
    return part == "generated data" or test.is_papers


def _describe_effects(effects: Sequence[float]) -> str:
    """Return the paper's differences as text: one, or the range of several, or ``no number``.

    Args:
        effects: the differences in percent, the smallest first.
    """
    # A dict keeps the two ends in order, and only one of them if they read the same.
    ends = dict.fromkeys(format_percent(effect) for effect in [*effects[:1], *effects[-1:]])
    return f"{' to '.join(ends)}%" if ends else "no number"


def draw(papers: Mapping[str, Sequence[Test]], file: Path) -> None:
    """Draw the tests on real data: the difference with its interval, and the paper's beside it.

    Args:
        papers: paper -> tests of its claims.
        file: the picture to write.
    """
    # A line for each paper's name, and one for each of its tests.
    rows: list[Test | str] = []
    for paper, tests in papers.items():
        drawn = [test for test in tests if paper != DEMONSTRATIONS and test.effects]
        rows += [paper, *drawn] if drawn else []
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(9.0, 1.0 + 0.21 * len(rows)), layout="constrained")
        axis = figure.subplots()
        for place, test in enumerate(rows):
            if isinstance(test, str):
                continue
            color = next(color for name, color in COLORS.items() if test.verdict.startswith(name))
            found, effects = test.measured, test.effects
            ends = [[found.difference - found.low], [found.high - found.difference]]
            axis.errorbar(found.difference, place, xerr=ends, fmt="o", color=color, markersize=5)
            axis.plot(effects, [place] * len(effects), "D", color="black", mfc="none", markersize=4)
        axis.axvline(0, color="black", linewidth=0.8)
        names = [x if isinstance(x, str) else f"{x.claim}: {x.data}" for x in rows]
        axis.set_yticks(range(len(rows)), names)
        for label, row in zip(axis.get_yticklabels(), rows, strict=True):
            label.set_fontweight("bold" if isinstance(row, str) else "normal")
        axis.tick_params(axis="y", length=0)
        axis.set_ylim(len(rows) - 0.4, -0.6)
        axis.set_xlim(-_FARTHEST, _FARTHEST)
        axis.set_xlabel("difference in percent; to the right the claim is supported")
        for name, color in COLORS.items():
            axis.plot([], [], "o-", color=color, label=name, markersize=5)
        axis.plot([], [], "D", color="black", mfc="none", label="the paper", markersize=4)
        axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=5, frameon=False)
        axis.grid(axis="x", alpha=0.3)
        axis.spines[["top", "right", "left"]].set_visible(False)
        figure.savefig(file, dpi=130)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables of claims and the picture; with ``--check`` nothing is written.

    Args:
        arguments: the command line; by default that of the process.

    Returns:
        Exit status: 1 if ``--check`` finds that a table differs.
    """
    parser = argparse.ArgumentParser(description="Judge the papers' claims by results/tables/.")
    parser.add_argument("--check", action="store_true", help="write nothing, fail if it differs")
    args = parser.parse_args(arguments)
    page = RESULTS / "README.md"
    papers = read_claims(CLAIMS, RESULTS)
    if not args.check:
        draw(papers, RESULTS / "claims.png")
    text = _TABLE.sub(
        lambda match: f"{match[1]}{tabulate(papers, match[2])}{match[4]}", page.read_text("utf-8")
    )
    return write_pages({page: text}, args.check)


if __name__ == "__main__":
    sys.exit(main())
