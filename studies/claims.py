"""Judges the papers' claims in results/claims.yaml by the tables of results/.

    python studies/claims.py [--check]

Fills the table between ``<!-- begin claims -->`` and ``<!-- end -->`` of results/README.md, whose
words say what a verdict means, and draws results/claims.png: each difference as a multiple of the
paper's. Figures are those of results/tables/; nothing is computed again.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import pandas as pd
import yaml
from matplotlib.figure import Figure

from recbole_pos.study.rendered_table import format_interval, format_number
from recbole_pos.study.result_tables import SEED_NOISE_NOTES, format_metric

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
CLAIMS = RESULTS / "claims.yaml"
METRIC = "ndcg@10"  # of a claim that names none
# Verdict -> its color in the picture.
COLORS = {"replicated": "#0072B2", "not replicated": "#D55E00", "inconclusive": "#595959"}
_TABLE = re.compile(r"(?<=<!-- begin claims -->\n).*?(?=<!-- end -->)", re.DOTALL)
_LINK = re.compile(r"\[(.+?)\]\(.+?\)")
_FARTHEST = 6.0  # of the picture; what lies beyond is an arrow


class Measured(NamedTuple):
    """A measured difference between two configurations, as a table of results has it.

    Attributes:
        difference: the difference of their metric.
        low: lower end of its confidence interval.
        high: upper end of its confidence interval.
        detectable: smallest difference that the test would have found.
        is_significant: whether the table marks it with a star.
        mark: what follows the interval: nothing, † for one seed, ‡ without any noise of seeds.
    """

    difference: float
    low: float
    high: float
    detectable: float
    is_significant: bool
    mark: str

    def __str__(self) -> str:
        """Return difference and interval as the tables write them."""
        star = "*" if self.is_significant else ""
        difference = f"{format_number(self.difference, sign=True)}{star}"
        return f"{difference} {format_interval(self.low, self.high)}{self.mark}"


class Test(NamedTuple):
    """A test of a claim.

    Attributes:
        at: where, in markdown.
        measured: the difference; None where there is none.
        verdicts: dataset of the paper -> verdict against its margin there; all of them under ""
            without a margin.
        margin: the paper's difference to draw the measured one by, if there is one.
        words: what was found without a difference, or a note on the verdict.
    """

    at: str
    measured: Measured | None
    verdicts: dict[str, str]
    margin: float | None
    words: str


class Claim(NamedTuple):
    """A claim of a paper, and the tests of it here.

    Attributes:
        text: the claim in words.
        metric: the metric that it is about.
        margins: dataset of the paper -> the difference that the paper reports there.
        tests: what was found here.
    """

    text: str
    metric: str
    margins: Mapping[str, float]
    tests: list[Test]


def judge(measured: Measured, margin: float | None, expects: str = "better") -> str:
    """Return the verdict on a claim; results/README.md has the rule.

    A significant difference decides by its direction. Without one, the claim is not replicated if
    the paper's difference lies outside the confidence interval, and else the test is inconclusive.

    Args:
        measured: the difference here.
        margin: the paper's difference, with its sign; None if it reports none.
        expects: better, worse, or same, for a claim of a small or no effect.
    """
    if measured.is_significant and expects != "same":
        found = "better" if measured.difference > 0 else "worse"
        return "replicated" if found == expects else f"not replicated: significantly {found}"

    is_outside = margin is not None and not measured.low <= margin <= measured.high
    is_outside &= measured.mark != "‡"  # without noise of seeds an interval is too narrow
    return "not replicated" if is_outside else "inconclusive"


def measure(results: Path, table: str, metric: str, row: str, base: str) -> Measured:
    """Return the difference between two configurations that a table of results has.

    A table has it in one direction; for the other one, signs are turned.

    Args:
        results: folder of results.
        table: ``STUDY :: TITLE``, the study's file and the title of a table in it.
        metric: the metric.
        row: the configuration that is compared.
        base: the configuration that it is compared with.

    Raises:
        KeyError: if the table has no such difference in either direction.
    """
    study, _, title = table.partition(" :: ")
    lines = pd.read_csv(results / "tables" / f"{study}.csv")
    keys = ["table", "metric", "bin", "row", "reference"]
    lines = lines.set_index(keys).sort_index()
    key = (title, metric, "all targets")
    sign = 1 if (*key, row, base) in lines.index else -1
    try:
        line = lines.loc[(*key, row, base) if sign == 1 else (*key, base, row)]
    except KeyError:
        raise KeyError(f"{table} has no difference in {metric} between {row} and {base}") from None

    low, high = sorted((sign * line["low"], sign * line["high"]))
    is_significant = line["star"] in (True, "True")  # text, where a column has empty cells
    difference, mark = sign * line["difference"], SEED_NOISE_NOTES.get(line["seed_noise"], "")[:1]
    return Measured(difference, low, high, line["detectable"], is_significant, mark)


def read_claims(file: Path, results: Path) -> Iterator[Claim]:
    """Yield the claims of a yaml file, with what the tables of results say of each.

    Args:
        file: the yaml file.
        results: folder of results.
    """
    for claim in yaml.safe_load(file.read_text("utf-8")):
        claim = {"metric": METRIC, "margin": {}, "expects": "better", **claim}
        tests = [_read_test(test, claim, results) for test in claim["here"]]
        yield Claim(claim["claim"], claim["metric"], claim["margin"], tests)


def _read_test(test: Mapping[str, Any], claim: Mapping[str, Any], results: Path) -> Test:
    """Return one test of a claim, with its verdicts.

    Args:
        test: what the yaml file says of the test: where the difference stands or, without one, what
            was ``found`` and the verdict.
        claim: what the file says of the claim: its metric, the paper's margins, what it expects.
        results: folder of results.
    """
    if "found" in test:
        return Test(test["at"], None, {"": test["verdict"]}, None, test["found"])

    # A test may be about one dataset of the paper only.
    own, margins = test.get("margin"), claim["margin"]
    margins = {own: margins[own]} if own else margins

    measured = measure(results, test["table"], claim["metric"], test["row"], test["from"])
    verdicts = {
        name: judge(measured, margin, claim["expects"])
        for name, margin in (margins or {"": None}).items()
    }
    margin = next(iter(margins.values()), None)
    return Test(test["at"], measured, verdicts, margin, test.get("note", ""))


def tabulate(claims: Sequence[Claim]) -> str:
    """Return the table of the claims in markdown, with a row for each test.

    The words of a claim, with the paper's margins, stand in the first of its rows only.
    """
    lines = [
        "| claim (the paper's margin) | here | difference [95% CI] | verdict | MDD |",
        "|---|---|---|---|---|",
    ]
    for claim in claims:
        named = [] if claim.metric == METRIC else [format_metric(claim.metric)]
        margins = [f"{name} {format_number(x, sign=True)}" for name, x in claim.margins.items()]
        if margins:
            named.append(", ".join(margins))
        text = claim.text + (f" ({': '.join(named)})" if named else "")

        for test in claim.tests:
            found = test.words if test.measured is None else str(test.measured)
            detectable = "" if test.measured is None else format_number(test.measured.detectable)
            verdict = _describe(test.verdicts)
            if test.measured is not None and test.words:
                verdict += f" ({test.words})"
            lines.append(f"| {text} | {test.at} | {found} | {verdict} | {detectable} |")
            text = ""
    return "".join(f"{line}\n" for line in lines)


def _describe(verdicts: Mapping[str, str]) -> str:
    """Return the verdicts of a test as text.

    One verdict if all are the same, and else ``replicated (Beauty), inconclusive (Games)``.

    Args:
        verdicts: dataset of the paper -> verdict.
    """
    if len(set(verdicts.values())) == 1:
        return next(iter(verdicts.values()))
    by_verdict: dict[str, list[str]] = {}
    for name, verdict in verdicts.items():
        by_verdict.setdefault(verdict, []).append(name)
    return ", ".join(f"{verdict} ({', '.join(names)})" for verdict, names in by_verdict.items())


def draw(claims: Sequence[Claim], file: Path) -> None:
    """Draw each difference for which the paper has a margin, as a multiple of that margin.

    The dashed line at 1 is the paper's difference. What lies beyond the picture is cut off there,
    and has an arrow.

    Args:
        claims: the claims with their tests.
        file: the picture to write.
    """
    drawn = [
        (claim, test) for claim in claims for test in claim.tests if test.measured and test.margin
    ]
    with matplotlib.rc_context({"font.size": 8}):
        figure = Figure(figsize=(9.0, 0.9 + 0.19 * len(drawn)), layout="constrained")
        axis = figure.subplots()
        labels = []
        for place, (claim, test) in enumerate(drawn):
            assert test.measured is not None and test.margin

            # The interval as a line, with arrows where it goes on beyond the picture.
            verdict = next(iter(test.verdicts.values()))
            color = COLORS[verdict.partition(":")[0]]
            multiples = [value / test.margin for value in test.measured[:3]]
            middle, low, high = (min(max(x, -_FARTHEST), _FARTHEST) for x in multiples)
            axis.plot([low, high], [place, place], color=color, linewidth=1.2)
            for end in sorted({x for x in (low, high) if abs(x) == _FARTHEST}):
                axis.plot(end, place, ">" if end > 0 else "<", color=color, markersize=4)
            # The difference as a dot, if it is in the picture; hollow for an interval with a mark.
            if middle == multiples[0]:
                face = "white" if test.measured.mark else color
                axis.plot(middle, place, "o", color=color, mfc=face, markersize=4)
            label = _LINK.sub(r"\1", f"{claim.text}: {test.at}")
            labels.append(label.replace("*", ""))

        axis.axvline(0, color="black", linewidth=0.8)
        axis.axvline(1, color="black", linewidth=0.8, linestyle="--")
        axis.set_yticks(range(len(drawn)), labels)
        axis.set_ylim(len(drawn) - 0.4, -0.6)
        axis.set_xlim(-_FARTHEST - 0.3, _FARTHEST + 0.3)
        axis.set_xlabel("difference here as a multiple of the paper's (dashed: 1), 95% CI")
        for name, color in COLORS.items():
            axis.plot([], [], "o-", color=color, label=name, markersize=4)
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(COLORS), frameon=False)
        axis.grid(axis="x", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(file, dpi=130)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table of claims and the picture.

    With ``--check`` nothing is written.

    Args:
        arguments: the command line; by default that of the process.

    Returns:
        Exit status: 1 if ``--check`` finds that the table differs.
    """
    parser = argparse.ArgumentParser(description="Judge the papers' claims by results/tables/.")
    parser.add_argument("--check", action="store_true", help="write nothing, fail if it differs")
    args = parser.parse_args(arguments)
    page = RESULTS / "README.md"
    claims = list(read_claims(CLAIMS, RESULTS))
    before = page.read_text("utf-8")
    after = _TABLE.sub(lambda _: tabulate(claims), before)
    if args.check:
        print(f"{page}: {'differs' if after != before else 'as it should be'}")
        return int(after != before)
    page.write_text(after, encoding="utf-8")
    draw(claims, RESULTS / "claims.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
