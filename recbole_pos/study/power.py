"""Which difference a study will detect, before it is trained.

In: results with two seeds of the reference at least, and perhaps of other rows on the same data.
Out: a table of the minimum detectable difference at 80% power for 1 to 10 seeds. The variances are
those of ``statistics.py``: with n seeds on each side and U units, a difference of two means has

    variance(n) = d / U + (e1 + e2) / (n U) + (a1 + a2) / n

where a is the variance between the seeds of a row, e that of a unit's value within a seed, and d
that of the units' true differences, which more seeds do not reduce.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from recbole_pos.errors import UsageError
from recbole_pos.study.rendered_table import Cell, RenderedTable, format_number
from recbole_pos.study.result_tables import format_metric
from recbole_pos.study.results import Results
from recbole_pos.study.statistics import Estimate, SeedNoise, compute_pseudo_values

_MOST_SEEDS = 10  # lines of the table
_MOST_SEARCHED = 500  # numbers of seeds that are tried for a wanted difference
_MOST_ROWS = 4  # columns of the table for rows besides the reference


@dataclass(frozen=True)
class PairNoise:
    """The noise of the difference of two rows (configurations), as in the formula of this module.

    Attributes:
        num_units: number of units (users), U in the formula.
        difference: variance of the units' true differences, d.
        within: variance of a unit's value within a seed, summed over both rows, e1 + e2.
        between: variance between the seeds of each row, a1 and a2, each with the noise of its
            estimate, e / U.
    """

    num_units: int
    difference: float
    within: float
    between: tuple[float, float]

    @classmethod
    def from_values(cls, row: np.ndarray, reference: np.ndarray) -> PairNoise:
        """Estimate the noise of the difference of two rows (configurations of a study).

        A unit is a user or a session, over which a metric is averaged. ``SeedNoise`` has the
        variance of a row's mean between its seeds, and the part of it that comes from units.

        Args:
            row, reference: [seeds, units] values of the same units, with two seeds or more.
        """
        # The noise of the seeds of each row, and of a unit within a seed. SeedNoise.within is of a
        # mean over units; times their number it is that of a single unit.
        num_units = row.shape[1]
        row_noise = SeedNoise.from_values(row)
        reference_noise = SeedNoise.from_values(reference)
        assert row_noise is not None and reference_noise is not None  # they have two seeds
        row_within = row_noise.within * num_units
        reference_within = reference_noise.within * num_units

        # What units differ by truly: a mean over seeds still has a part of the variance within
        # seeds, which is subtracted.
        unit_variance = float((row.mean(0) - reference.mean(0)).var(ddof=1))
        explained = row_within / len(row) + reference_within / len(reference)
        difference = max(unit_variance - explained, 0.0)
        between = row_noise.between, reference_noise.between
        return cls(num_units, difference, row_within + reference_within, between)

    def predict_detectable(self, num_seeds: int) -> float:
        """Return the minimum detectable difference of a study with some number of seeds.

        Args:
            num_seeds: number of seeds of both rows.

        Returns:
            The difference that 80% of such studies find significant. It is nan for one seed, with
            which no difference counts as significant, and if nothing varies.
        """
        if num_seeds < 2:
            return math.nan

        # The variance of the difference: a part that falls with the number of units, and one that
        # falls with the number of seeds. The noise of units is in both, so it is subtracted once.
        unit_variance = (self.difference + self.within / num_seeds) / self.num_units
        seed_variance = (sum(self.between) - self.within / self.num_units) / num_seeds
        variance = unit_variance + max(seed_variance, 0.0)
        if variance == 0:
            return math.nan

        # Its degrees of freedom, by Satterthwaite, as for an estimated difference.
        parts = [unit_variance**2 / (self.num_units - 1)]
        parts += [(between / num_seeds) ** 2 / (num_seeds - 1) for between in self.between]
        # The degrees of freedom of a sum are never fewer than those of its parts.
        df = max(variance**2 / sum(parts), min(self.num_units, num_seeds) - 1)
        # What is detectable depends on the error only, so any difference (0.0) will do; "own" says
        # that both rows have several seeds.
        return Estimate(0.0, math.sqrt(variance), df, "own").detectable

    def count_needed_seeds(self, difference: float) -> int | None:
        """Return the least number of seeds that detects a difference; None if 500 do not."""
        for num_seeds in range(2, _MOST_SEARCHED + 1):
            if self.predict_detectable(num_seeds) <= difference:
                return num_seeds
        return None


def make_power_table(results: Results, wanted: float | None = None) -> RenderedTable:
    """Return a table of the minimum detectable differences of a study, by its number of seeds.

    The minimum detectable difference is the true difference that 80% of such studies would find
    significant. The first column is for a row (configuration) that is as noisy as the reference,
    the others are for rows that have been trained.

    Args:
        results: results with at least two seeds of the reference.
        wanted: a difference, for which a line says how many seeds it takes; None for no such line.

    Raises:
        UsageError: if the reference does not have two seeds with ranks of the test targets.
    """
    table = results.plan.tables[0]
    metric, reference = table.metrics[0], table.reference
    noises = _estimate_noises(results, metric, reference)

    # A line for each number of seeds, and one for the wanted difference.
    seeds = range(1, _MOST_SEEDS + 1)
    columns = {"seeds of each": [Cell(f"{number}") for number in seeds]}
    for name, noise in noises.items():
        columns[name] = [Cell(format_number(noise.predict_detectable(number))) for number in seeds]
    if wanted is not None:
        columns["seeds of each"].append(Cell(f"needed for {wanted:g}"))
        for name, noise in noises.items():
            needed = noise.count_needed_seeds(wanted)
            columns[name].append(Cell(f"over {_MOST_SEARCHED}" if needed is None else f"{needed}"))

    units = next(iter(noises.values())).num_units
    notes = (
        f"{format_metric(metric)} of {units:,} {results.plan.unit}s. A difference of this size is "
        "found by 80% of studies; Holm's correction over several rows needs a larger one.",
        f"First column: as if another system found the targets of {reference} and differed from "
        "it by its level only. It is a lower bound. The other columns are of rows that have run.",
        "One seed gets no star. The noise of seeds is estimated from few of them and is uncertain.",
    )
    title = f"Minimum detectable difference from {reference} at 80% power"
    return RenderedTable(title, tuple(columns), tuple(zip(*columns.values(), strict=True)), notes)


def _estimate_noises(results: Results, metric: str, reference: str) -> dict[str, PairNoise]:
    """Estimate the noise of differences from the reference, for each column of the table.

    Args:
        results: results of the study, with the ranks of its runs.
        metric: metric that is compared, such as ``ndcg@10``.
        reference: name of the row (configuration) that others are compared to.

    Returns:
        Name of a column -> noise. The first is of a row like the reference, the others of up to
        four rows with two seeds or more.

    Raises:
        UsageError: if the reference does not have two seeds with ranks; says how to train them.
    """
    ranks = results.ranks
    num_seeds = 0 if ranks is None else len(ranks.list_seeds(reference))
    if ranks is None or num_seeds < 2:
        raise UsageError(
            f"--plan: {reference} has {num_seeds} finished runs, and two seeds show its noise; "
            f"train them by the same command with --rows '{reference}' --seeds 2 and without --plan"
        )

    # Values [seeds, users] of each row. Pseudo-values are made so that their plain mean over users
    # is the mean over targets, also if users have different numbers of targets.
    totals, num_targets = ranks.sum_gains(metric)
    values = {row: compute_pseudo_values(sums, num_targets) for row, sums in totals.items()}
    own = values[reference]
    # A row that has not been trained is assumed to be as noisy as the reference itself.
    noises = {f"like {reference}": PairNoise.from_values(own, own)}
    for row, row_values in values.items():
        if row != reference and len(row_values) > 1 and len(noises) <= _MOST_ROWS:
            noises[row] = PairNoise.from_values(row_values, own)
    return noises
