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
        sides: noise between the seeds of each row. ``within`` is e / U, and ``between`` is a and
            that noise of its estimate.
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

        A unit is a user or a session, over which a metric is averaged.

        Args:
            row, reference: [seeds, units] values of the same units, with two seeds or more. The
                same array twice stands for two rows that are equally noisy.
        """
        # How the mean of a run varies with its seed: for each row, and for both together.
        sides = SeedNoise.from_values(row), SeedNoise.from_values(reference)
        pooled = SeedNoise.pool([row] if row is reference else [row, reference])

        # Variance of the units' true differences. The mean of a unit over n seeds also has 1/n of
        # the noise of that unit within a seed, which is subtracted. ``within`` is this noise in a
        # mean over all units, so it is multiplied by the number of units.
        _, num_units = row.shape
        unit_variance = float((row.mean(0) - reference.mean(0)).var(ddof=1))
        seed_part = sides[0].within / len(row) + sides[1].within / len(reference)
        true_variance = max(unit_variance - seed_part * num_units, 0.0)
        return cls(num_units, true_variance, sides, pooled)

    def predict_detectable(self, num_seeds: int) -> float:
        """Return the minimum detectable difference of a study with some number of seeds.

        It is the true difference with which 80% of such studies have a 95% confidence interval that
        excludes zero. A study of several seeds estimates the noise between them itself. A study of
        one seed takes it from the runs that exist, and then assumes that a new row is as noisy.

        Args:
            num_seeds: number of seeds of both rows (configurations).

        Returns:
            The difference; nan if nothing varies.
        """
        # (factor, noise between seeds): the variance of the difference grows by factor * noise.
        # The factor is 1 / n for n seeds. Pooled noise has a factor that grows with the mean metric
        # of the row it is used for (``level``). ``df`` are degrees of freedom.
        if num_seeds > 1:
            noises = [(1 / num_seeds, replace(side, df=num_seeds - 1)) for side in self.sides]
        elif self.pooled is None:
            noises = []
        else:
            factor = sum(self.pooled.compute_factor(side.level) for side in self.sides)
            noises = [(factor, self.pooled)]

        # ``difference`` is the variance of the units' true differences. A mean over seeds also has
        # a part of the variance between units within a seed (``within``).
        within = sum(side.within for side in self.sides)
        unit_variance = self.difference / self.num_units + within / num_seeds
        error, df = combine_noise(unit_variance, self.num_units, noises)
        # What is detectable depends on the error and its degrees of freedom only, so any difference
        # (0.0) and any source of the noise ("own") will do.
        return Estimate(0.0, error, df, "own").detectable

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

    The minimum detectable difference is the true difference that 80% of such studies would find
    significant. The first column is for a row (configuration) that is as noisy as the reference,
    the others are for rows that have been trained. A metric is averaged over units (users).

    Args:
        results: results with at least two seeds of the reference.
        wanted: a difference, for which a line says how many seeds it takes; None for no such line.

    Raises:
        UsageError: if the reference does not have two seeds with ranks of the test targets.
    """
    table = results.plan.tables[0]
    metric, reference = table.metrics[0], table.reference
    noises = _estimate_noises(results, metric, reference)

    # A line for each number of seeds from 1 to _MOST_SEEDS (10), and one for the wanted difference.
    # A mark at one seed refers to its note below the table.
    seeds = range(1, _MOST_SEEDS + 1)
    columns = {"seeds of each": [Cell("1†" if number == 1 else f"{number}") for number in seeds]}
    for name, noise in noises.items():
        columns[name] = [Cell(format_number(noise.predict_detectable(number))) for number in seeds]
    if wanted is not None:
        columns["seeds of each"].append(Cell(f"needed for {wanted:g}"))
        for name, noise in noises.items():
            needed = noise.count_needed_seeds(wanted)
            columns[name].append(Cell(f"over {_MOST_SEARCHED}" if needed is None else f"{needed}"))

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
    return RenderedTable.from_columns(title, columns, notes)


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

    # sum_gains returns row -> [seeds, users] sums over the targets of each user, and the numbers of
    # these targets. Pseudo-values [seeds, users] are made so that their plain mean over users is
    # the mean over targets, also if users have different numbers of targets.
    totals, num_targets = ranks.sum_gains(metric)
    values = {row: compute_pseudo_values(sums, num_targets) for row, sums in totals.items()}
    reference_values = values[reference]
    # A row that has not been trained is assumed to be as noisy as the reference itself. Besides
    # that column there are at most _MOST_ROWS (four).
    noises = {f"like {reference}": PairNoise.from_values(reference_values, reference_values)}
    for row, row_values in values.items():
        if row != reference and len(row_values) > 1 and len(noises) <= _MOST_ROWS:
            noises[row] = PairNoise.from_values(row_values, reference_values)
    return noises
