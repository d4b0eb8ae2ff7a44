"""p-values of differences: a test by random sign flips, and Holm's correction for several tests."""

from __future__ import annotations

import itertools
import math

import numpy as np

_MOST_UNITS_IN_FULL = 13  # up to so many units, all sign flips are tried, 2^13 at most
_NUM_RANDOM_FLIPS = 9_999  # of more units
_MOST_SIGNS = 20_000_000  # in memory at a time


def flip_signs(differences: np.ndarray) -> np.ndarray:
    """Test by random sign flips of units whether differences are symmetric about zero.

    If two rows (configurations) were exchangeable, the difference of each unit (user) could as well
    have the opposite sign (Fisher's randomisation test). The p-value is the share of sign flips
    whose sum is as far from zero as the real one. All flips are tried where up to 13 units differ,
    otherwise 9,999 random ones, the same for all comparisons. The test is of these trained models
    and does not cover the noise of seeds.

    Args:
        differences: [units, comparisons] sums over the targets of a unit. The p-values are
            two-sided, [comparisons], and 1 where no unit differs.
    """
    # The distance of each real sum from zero, a little smaller, so that sums that are equal but for
    # rounding reach it.
    thresholds = np.abs(differences.sum(0)) * (1 - 1e-6) - 1e-12
    p_values = np.empty(len(thresholds))
    sampled = []  # comparisons with too many units (_MOST_UNITS_IN_FULL, 13) to try all flips
    for comparison, column in enumerate(differences.T):
        values = column[column != 0]  # a difference of 0 has no sign to flip
        if len(values) > _MOST_UNITS_IN_FULL:
            sampled.append(comparison)
            continue
        # All combinations of signs, for two units [[1, 1], [1, -1], [-1, 1], [-1, -1]].
        signs = np.array(list(itertools.product([1, -1], repeat=len(values))))
        sums = np.abs(signs @ values)
        p_values[comparison] = (sums >= thresholds[comparison]).mean()

    if sampled:
        # Units whose difference is 0 in all of these comparisons add nothing to a sum.
        has_value = (differences[:, sampled] != 0).any(1)  # [units]
        p_values[sampled] = _sample_flips(differences[has_value][:, sampled], thresholds[sampled])
    return p_values


def _sample_flips(values: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Return the p-values of random sign flips: the share whose sum is far enough from zero.

    Args:
        values: [units, comparisons] values whose signs are flipped at random.
        thresholds: [comparisons] distance from zero that the sum of the real values has. A flip
            counts if its sum is at least as far from zero.

    Returns:
        [comparisons] p-values. The real signs count as one more flip, so that none is zero.
    """
    rng = np.random.default_rng(0)  # fixed, so that a report can be made again with the same p
    num_units, num_comparisons = values.shape
    num_reached = np.zeros(num_comparisons)
    chunk_size = max(_MOST_SIGNS // num_units, 1)  # flips in memory at a time
    for start in range(0, _NUM_RANDOM_FLIPS, chunk_size):
        num_flips = min(chunk_size, _NUM_RANDOM_FLIPS - start)
        # [flips, units] a random bit: 1 if the unit keeps its sign in this flip, 0 if not.
        num_bits = num_flips * num_units
        random_bytes = np.frombuffer(rng.bytes(math.ceil(num_bits / 8)), dtype=np.uint8)
        keeps_sign = np.unpackbits(random_bytes, count=num_bits).reshape(num_flips, num_units)
        # [flips, comparisons] sums of the values that keep their sign. The others are subtracted:
        # kept - (total - kept) is the sum of all values with the signs of the flip.
        kept = keeps_sign.astype(np.float32) @ values.astype(np.float32)
        sums = 2 * kept - values.sum(0)
        num_reached += (np.abs(sums) >= thresholds).sum(0)
    return (num_reached + 1) / (_NUM_RANDOM_FLIPS + 1)


def correct_by_holm(p: np.ndarray) -> np.ndarray:
    """Correct p-values [tests] for multiple tests by Holm's method (1979).

    The smallest of n p-values is multiplied by n, the next by n - 1, and so on; none gets smaller
    than the one before. For [0.01, 0.04, 0.03] the result is [0.03, 0.06, 0.06]. It is at most 1.
    A p-value that is nan (there is no test) does not count and stays nan.
    """
    corrected = np.full(p.shape, np.nan)
    num_tests = np.count_nonzero(~np.isnan(p))
    order = np.argsort(p, kind="stable")[:num_tests]  # argsort has nan last
    ascending = np.maximum.accumulate(p[order] * np.arange(num_tests, 0, -1))
    corrected[order] = np.minimum(ascending, 1.0)
    return corrected
