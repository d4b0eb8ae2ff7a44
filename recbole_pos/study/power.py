"""Which difference a study will detect, before it is trained.

In: results with two seeds of the reference at least, and perhaps of other rows on the same data.
Out: a table of the minimum detectable difference at 80% power for 1 to 10 seeds. The variances are
those of ``statistics.py``: with n seeds on each side and U units, a difference of two means has

    variance(n) = d / U + (e1 + e2) / (n U) + (a1 + a2) / n

where a is the variance between the seeds of a row, e that of a unit's value within a seed, and d
that of the units' true differences, which more seeds do not reduce.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from recbole_pos.errors import UsageError
from recbole_pos.study.rendered_table import Cell, RenderedTable, format_number
from recbole_pos.study.result_tables import format_metric
from recbole_pos.study.results import Results
from recbole_pos.study.statistics import (
    Estimate,
    SeedNoise,
    combine_noise,
    compute_pseudo_values,
)

_MOST_SEEDS = 10  # lines of the table
_MOST_SEARCHED = 500  # numbers of seeds that are tried for a wanted difference
_MOST_ROWS = 4  # columns of the table for rows besides the reference


@dataclass(frozen=True)
class PairNoise:
    """The noise of the difference of two rows (configurations), in the parts of this formula.

    With n seeds of each row and U units, the difference of their means has the variance
    ``d / U + (e1 + e2) / (n U) + (a1 + a2) / n``: d is the variance of the units' true differences,
    e that of a unit's value within a seed, and a that between the seeds of a row.

    Attributes:
        num_units: number of units (users), U in the formula.
        difference: variance of the units' true differences, d.
        sides: noise between the seeds of each row: ``within`` is e / U, and ``between`` is
            a + e / U, the variance of the means of runs with different seeds.
        pooled: noise of both rows together, which a study of one seed takes; None if no value
            depends on the seed.
    """

    num_units: int
    difference: float
    sides: tuple[SeedNoise, SeedNoise]
    pooled: SeedNoise | None

    @classmethod
    def from_values(cls, row: np.ndarray, reference: np.ndarray) -> PairNoise:
        """Estimate the noise of the difference of two rows (configurations) from trained runs.

        Args:
            row, reference: [seeds, units] values of a metric for the same units (users), with two
                seeds or more. The same array twice stands for a row that is as noisy as the
                reference.
        """
        sides = SeedNoise.from_values(row), SeedNoise.from_values(reference)

        # The mean of a unit over n seeds varies between units by its true difference (d) and by
        # what is left of the noise within a seed (e1 / n + e2 / n). So subtract the latter; e is
        # ``within`` times U.
        _, num_units = row.shape
        unit_variance = float((row.mean(0) - reference.mean(0)).var(ddof=1))
        row_side, reference_side = sides
        seed_part = row_side.within / len(row) + reference_side.within / len(reference)
        true_variance = max(unit_variance - seed_part * num_units, 0.0)
        # The same runs, given for both rows, are only one estimate of the noise.
        pooled = SeedNoise.pool([row] if row is reference else [row, reference])
        return cls(num_units, true_variance, sides, pooled)

    def predict_detectable(self, num_seeds: int) -> float:
        """Return the minimum detectable difference of a study with some number of seeds.

        It is the true difference with which 80% of such studies have a 95% confidence interval that
        excludes zero. A study of several seeds estimates the noise between them itself. A study of
        one seed takes it from the runs that exist, and then assumes that a new row is as noisy.

        Args:
            num_seeds: number of seeds of both rows (configurations), n in the formula.

        Returns:
            The difference; nan if nothing varies.
        """
        # What the seeds add to the variance of the difference.
        if (
            num_seeds > 1
        ):  # each side has 1 / n of its noise, estimated with n - 1 degrees of freedom
            noises = [replace(side, df=num_seeds - 1).scale(1 / num_seeds) for side in self.sides]
        elif self.pooled is None:
            noises = []
        else:  # both sides take the pooled noise, which grows with the mean metric of the side
            factors = [self.pooled.compute_factor(side.level) for side in self.sides]
            noises = [self.pooled.scale(sum(factors))]

        # The variance between units, d / U + (e1 + e2) / (n U).
        within = sum(side.within for side in self.sides)
        unit_variance = self.difference / self.num_units + within / num_seeds
        error, df = combine_noise(unit_variance, self.num_units, noises)
        # Only error and degrees of freedom matter for what is detectable.
        return Estimate(difference=0.0, error=error, df=df, seed_noise="own").detectable

    def count_needed_seeds(self, difference: float) -> int | None:
        """Return the least number of seeds that detects a difference; None if 500 do not.

        It is two at least, since a difference counts as significant only with two seeds. The most
        seeds that are tried are ``_MOST_SEARCHED``, which is 500.
        """
        for num_seeds in range(2, _MOST_SEARCHED + 1):
            if self.predict_detectable(num_seeds) <= difference:
                return num_seeds
        return None


def make_power_table(results: Results, wanted: float | None = None) -> RenderedTable:
    """Return a table of the minimum detectable differences of a study, by its number of seeds.

    A line is a number of seeds from 1 to 10. A column is a pair of rows (configurations): the
    reference and a row that has been trained. In the first column the other row is like the
    reference: its runs have the same noise and find the same targets.

    Args:
        results: results with at least two seeds of the reference.
        wanted: a difference, for which a last line says how many seeds it takes; None for no such
            line.

    Raises:
        UsageError: if the reference does not have two seeds with ranks of the test targets.
    """
    table = results.plan.tables[0]
    metric, reference = table.metrics[0], table.reference
    noises = _estimate_noises(results, metric, reference)

    seeds = [str(number) for number in range(1, _MOST_SEEDS + 1)]
    seeds[0] += "†"  # the mark of a note below the table
    columns = {"seeds of each": seeds}
    for name, noise in noises.items():
        detectable = map(noise.predict_detectable, range(1, _MOST_SEEDS + 1))
        columns[name] = [format_number(value) for value in detectable]
    if wanted is not None:
        columns["seeds of each"].append(f"needed for {wanted:g}")
        for name, noise in noises.items():
            columns[name].append(str(noise.count_needed_seeds(wanted) or f"over {_MOST_SEARCHED}"))

    first_noise, *_ = noises.values()
    notes = (
        f"{format_metric(metric)} of {first_noise.num_units:,} {results.plan.unit}s. A difference "
        "of this size is found by 80% of studies; Holm's correction over several rows needs a "
        "larger one.",
        f"First column: as if another system found the targets of {reference} and differed from "
        "it by its level only. It is a lower bound. The other columns are of rows that have run.",
        "† one seed: the interval takes the noise between seeds of the runs that exist, and is too "
        "narrow for a noisier system; it can exclude 0, but gets no star. Two seeds do.",
        "The noise of seeds is estimated from few of them and is uncertain.",
    )
    title = f"Minimum detectable difference from {reference} at 80% power"
    cells = {name: [Cell(text) for text in column] for name, column in columns.items()}
    return RenderedTable.from_columns(title, cells, notes)


def _estimate_noises(results: Results, metric: str, reference: str) -> dict[str, PairNoise]:
    """Estimate the noise of differences from the reference, for each column of the table.

    Args:
        results: results of the study, with the ranks of its runs.
        metric: metric that is compared, such as ``ndcg@10``.
        reference: name of the row (configuration) that others are compared to.

    Returns:
        Name of a column -> noise of a row and the reference. The row of the first column has not
        been trained; it is taken to be as noisy as the reference. The others are up to four trained
        rows with two seeds or more.

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

    # For each row [seeds, users] a value of the metric for each user. Its mean over users is about
    # the mean over targets, also if users have different numbers of targets.
    totals, num_targets = ranks.sum_gains(metric)
    values = {row: compute_pseudo_values(sums, num_targets) for row, sums in totals.items()}
    reference_values = values.pop(reference)
    trained = [row for row in values if len(values[row]) > 1][:_MOST_ROWS]

    noises = {f"like {reference}": PairNoise.from_values(reference_values, reference_values)}
    for row in trained:
        noises[row] = PairNoise.from_values(values[row], reference_values)
    return noises
