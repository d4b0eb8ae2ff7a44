"""How many seeds a study needs: which difference it will detect with 1 to 10 of them.

Input are results with at least two seeds of the reference. Output is a table of the minimum
detectable difference at 80% power. The variances are those of ``statistics.py``: with n seeds of
each row (configuration), the difference of the means of two rows has

    variance(n) = true_variance + (between_1 + between_2) / n

where ``between`` is the variance of a row's mean between runs with different seeds, and
``true_variance`` comes from the units (users), whose true differences vary. More seeds do not
reduce it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recbole_pos.errors import UsageError
from recbole_pos.study.rendered_table import Cell, RenderedTable, format_number
from recbole_pos.study.result_tables import format_metric
from recbole_pos.study.results import Results
from recbole_pos.study.statistics import (
    SeedNoise,
    combine_noise,
    compute_detectable,
    compute_pseudo_values,
)

_MOST_SEEDS = 10  # lines of the table
_MOST_SEARCHED = 500  # numbers of seeds that are tried for a wanted difference
_MOST_ROWS = 4  # columns of the table for trained rows


@dataclass(frozen=True)
class PairNoise:
    """The noise of the difference of two rows' means, a row being a configuration of a study.

    Attributes:
        num_units: number of units (users).
        true_variance: variance of the difference that comes from the units. The true difference of
            two rows varies from unit to unit, and another sample of units has another mean.
        seed_noises: noise of the seeds of each row, for the mean of one run. ``between`` is the
            variance of the means of runs with different seeds; ``within`` is the part of it that
            comes from single units.
    """

    num_units: int
    true_variance: float
    seed_noises: tuple[SeedNoise, SeedNoise]

    @classmethod
    def from_values(cls, row: np.ndarray, reference: np.ndarray) -> PairNoise:
        """Estimate the noise of the difference of two rows (configurations) from trained runs.

        Each unit (user) has a difference of means over seeds. The differences vary from unit to
        unit for two reasons: the true ones do, and each has noise of its seeds. The noise is
        subtracted here, so that the variance of the true differences is left:

            true_variance = unit_variance - within_1 / seeds_1 - within_2 / seeds_2

        where ``within`` is what the noise of units adds to the variance of a mean with one seed.

        Args:
            row, reference: [seeds, units] values of a metric for the same units, with two seeds or
                more.
        """
        _, num_units = row.shape
        unit_differences = row.mean(0) - reference.mean(0)  # [units]
        unit_variance = float(unit_differences.var(ddof=1)) / num_units  # of the mean of them

        row_noise, reference_noise = SeedNoise.from_values(row), SeedNoise.from_values(reference)
        unit_noise = row_noise.within / len(row) + reference_noise.within / len(reference)
        true_variance = max(unit_variance - unit_noise, 0.0)  # no variance is negative
        return cls(num_units, true_variance, seed_noises=(row_noise, reference_noise))

    def predict_detectable(self, num_seeds: int) -> float:
        """Return the minimum detectable difference of a study with some number of seeds.

        It is the true difference with which 80% of such studies have a 95% confidence interval that
        excludes zero. It follows from the standard error that such a study will estimate.

        Args:
            num_seeds: number of seeds of both rows.

        Returns:
            The difference; nan if nothing varies.
        """
        # The variance between units (users) that the study will see. Their true differences vary,
        # and each has noise of its seeds, ``within``; a mean over n seeds has 1 / n of the noise.
        within = sum(noise.within for noise in self.seed_noises)
        unit_variance = self.true_variance + within / num_seeds

        # The noise between seeds of each row's mean, which is 1 / n of that of a single seed, too.
        # A study with several seeds estimates it from them, with few degrees of freedom. One with
        # a single seed cannot, and takes the noise that was estimated from the runs that exist.
        noises = list(self.seed_noises)
        if num_seeds > 1:
            noises = [noise.average(num_seeds) for noise in noises]

        error, df = combine_noise(unit_variance, self.num_units, noises)
        return compute_detectable(error, df)

    def count_needed_seeds(self, difference: float) -> int | None:
        """Return the least number of seeds that detects a difference; None if 500 do not.

        It is two at least, since a difference counts as significant only with two seeds. The most
        seeds that are tried are ``_MOST_SEARCHED``, which is 500.
        """
        numbers = range(2, _MOST_SEARCHED + 1)
        return next((n for n in numbers if self.predict_detectable(n) <= difference), None)


def make_power_table(results: Results, wanted: float | None = None) -> RenderedTable:
    """Return a table of the minimum detectable differences of a study, by its number of seeds.

    Each line is for a number of seeds from 1 to 10. Each column is for one row (a configuration):
    how small a difference of this row from the reference would be detected. The first column, "like
    <reference>", is for a row that has not been trained yet.

    Args:
        results: results with at least two seeds of the reference.
        wanted: a difference, for which a last line says how many seeds it takes; None for no such
            line.

    Raises:
        UsageError: if the reference does not have two seeds with ranks of the test targets.
    """
    table = results.plan.tables[0]
    metric, reference = table.metrics[0], table.reference
    noises = _estimate_noises(results, metric, reference)  # name of a column -> PairNoise

    numbers = range(1, _MOST_SEEDS + 1)  # of seeds, up to 10
    columns = {"seeds of each": list(map(str, numbers))}
    for name, noise in noises.items():
        columns[name] = [format_number(noise.predict_detectable(number)) for number in numbers]

    # The line of the wanted difference.
    if wanted is not None:
        columns["seeds of each"].append(f"needed for {wanted:g}")
        for name, noise in noises.items():
            columns[name].append(str(noise.count_needed_seeds(wanted) or f"over {_MOST_SEARCHED}"))

    # Notes below the table. The sign † marks the line of one seed, and its note.
    columns["seeds of each"][0] += "†"
    first_noise, *_ = noises.values()
    notes = (
        f"{format_metric(metric)} of {first_noise.num_units:,} {results.plan.unit}s. A difference "
        "of this size is found by 80% of studies; Holm's correction over several rows needs a "
        "larger one.",
        f"First column: a new system that finds the same targets as {reference} and is as noisy. "
        "Real systems differ more, so it is a lower bound. The other columns are of trained rows.",
        "† one seed: the interval takes the noise between seeds of the runs that exist, and is too "
        "narrow for a noisier system. A difference gets a star only with two seeds or more.",
        "The noise of seeds is estimated from few of them and is uncertain.",
    )
    title = f"Minimum detectable difference from {reference} at 80% power"
    cells = {name: [Cell(text) for text in column] for name, column in columns.items()}
    return RenderedTable.from_columns(title, cells, notes)


def _estimate_noises(results: Results, metric: str, reference: str) -> dict[str, PairNoise]:
    """Estimate the noise of the difference from the reference, for several rows.

    Args:
        results: results of the study, with the ranks of its runs.
        metric: metric that is compared, such as ``ndcg@10``.
        reference: name of the row (configuration) that others are compared to.

    Returns:
        Name of a row -> noise of its difference from the reference, for example ``{"like SASRec":
        PairNoise(...), "FPARec": PairNoise(...)}``. The first is a row that has not been trained,
        which is assumed to be like the reference. Then come up to four trained rows with two seeds
        or more. Left out are *coupled* rows, which start from the trained models of the reference
        and so share its noise.

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

    # ``totals``: row -> [seeds, users] sums of the metric over each user's targets. Users may have
    # different numbers of targets. compute_pseudo_values makes one value for each seed and user,
    # such that the plain mean over users is about the metric's mean over targets.
    totals, num_targets = ranks.sum_gains(metric)
    values = {row: compute_pseudo_values(sums, num_targets) for row, sums in totals.items()}
    reference_values = values.pop(reference)

    # A row that has not been trained yet is assumed to have the noise of the reference. The noise
    # of their difference is then that of the reference, counted twice.
    noises = {f"like {reference}": PairNoise.from_values(reference_values, reference_values)}

    # The trained rows, without coupled ones.
    is_coupled = {row: results.plan.are_coupled(row, reference) for row in values}
    trained = [row for row in values if len(values[row]) > 1 and not is_coupled[row]]
    for row in trained[:_MOST_ROWS]:
        noises[row] = PairNoise.from_values(values[row], reference_values)
    return noises
