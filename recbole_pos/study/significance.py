"""Tests over the units of a comparison, and the correction for making many of them."""

from __future__ import annotations

import numpy as np

_FEW = 13  # units whose 2^13 flips are all tried
_ROUNDS = 9_999
_CELLS = 20_000_000  # signs in memory at a time


def sign_flips(differences: np.ndarray, rounds: int = _ROUNDS, seed: int = 0) -> np.ndarray:
    """Tests that differences of units are as often so much below zero as above it.

    Signs of whole units are flipped at random, as they might have come out if the names of the two
    rows meant nothing: exactly where few units differ at all, by ``rounds`` random flips otherwise
    (Fisher's randomisation test). It takes the trained models as they are: what another
    seed would have made of them it does not know.

    Args:
        differences: [units, comparisons], sums over the targets of a unit; all comparisons get the
            same flips.
        rounds: random flips.
        seed: of these.

    Returns:
        [comparisons] two-sided p-values.
    """
    differences = np.asarray(differences, dtype=float)
    found = np.ones(differences.shape[1])
    many = []
    for column, values in enumerate(differences.T):
        values = values[values != 0]
        if len(values) > _FEW:
            many.append(column)
        elif len(values):
            bits = np.arange(2 ** len(values))[:, None] >> np.arange(len(values))
            sums = np.abs((1 - 2 * (bits & 1)) @ values)
            found[column] = (sums >= _just_below(abs(values.sum()))).mean()
    if many:
        chosen = differences[:, many]
        chosen = chosen[(chosen != 0).any(1)]
        found[many] = _random_flips(chosen, rounds, np.random.default_rng(seed))
    return found


def _random_flips(values: np.ndarray, rounds: int, rng: np.random.Generator) -> np.ndarray:
    units = len(values)
    observed = _just_below(np.abs(values.sum(0)))
    reached = np.zeros(values.shape[1])
    step = max(_CELLS // units, 1)
    for start in range(0, rounds, step):
        count = min(step, rounds - start)
        bits = np.frombuffer(rng.bytes(-(-count * units // 8)), dtype=np.uint8)
        up = np.unpackbits(bits, count=count * units).reshape(count, units).astype(np.float32)
        # sum of +-v is twice the sum of those that stay up, less the sum of all
        sums = 2 * (up @ values.astype(np.float32)) - values.sum(0)
        reached += (np.abs(sums) >= observed).sum(0)
    return (reached + 1) / (rounds + 1)


def _just_below(value: np.ndarray) -> np.ndarray:
    """Sums that are equal but for rounding count as reached."""
    return value * (1 - 1e-6) - 1e-12


def holm(p: np.ndarray) -> np.ndarray:
    """p-values corrected for being many (Holm, A simple sequentially rejective procedure, 1979).

    Args:
        p: [tests]; nan where there was none, and those do not count.

    Returns:
        [tests] the smallest level, over all tests together, at which each is still significant.
    """
    p = np.asarray(p, dtype=float)
    found = np.full(p.shape, np.nan)
    made = np.flatnonzero(~np.isnan(p))
    order = made[np.argsort(p[made], kind="stable")]
    corrected = np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1))
    found[order] = np.minimum(corrected, 1.0)
    return found
