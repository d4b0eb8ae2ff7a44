"""What generated studies say of intervals and stars; `make simulate` has more of them."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
from test_study_statistics import table_of

from recbole_pos.study import simulation
from recbole_pos.study.components import estimate
from recbole_pos.study.simulation import Case, bootstrap, cover, interval
from recbole_pos.study.statistics import differences


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


STUDIES = 300  # a share of 0.95 has a standard error of 0.0126 in so many


@pytest.mark.parametrize(
    "case",
    [
        Case((1, 1, 3, 3, 3), units=500),
        Case((3, 3), units=500),
        Case((2, 2), units=500),
        Case((3, 3), units=60, targets=20.0),
        Case((3, 3), units=500, shift=-0.5),
        Case((1, 1, 3, 3, 3), units=500, shift=-0.5),
    ],
    ids=["one seed", "three", "two", "few users", "better", "one seed, better"],
)
def test_intervals_cover_the_truth(case):
    found = cover(case, STUDIES)
    assert 0.95 - 3 * 0.0126 < found.rate <= 0.995
    assert found.above < 0.05 * STUDIES


def test_the_noise_between_seeds_is_needed():
    case = Case((1, 1, 3, 3, 3), of_seed=0.3)

    def without(rows, size):
        return estimate(rows[1], rows[0]).interval()

    assert cover(case, 100, method=without).rate < 0.7 < 0.9 < cover(case, 100).rate
    three = Case((3, 3), of_seed=0.3)
    assert cover(three, 100, method=bootstrap).rate < 0.9 < cover(three, 100).rate


def test_the_truth_of_a_generated_study_is_its_mean(rng):
    case = Case((40, 40), units=4000, shift=-0.8)
    rows, size = case.draw(rng)
    assert rows[1].mean() - rows[0].mean() == pytest.approx(case.truth(), rel=0.1)
    low, high = interval(rows, size)
    assert low < case.truth() < high


def test_stars_of_a_table_without_differences_are_rare(rng):
    case = Case((3, 3, 3, 3), units=200)
    starred = [differences(table_of(case, rng), ["ndcg@10"], "A")["star"].any() for _ in range(60)]
    assert np.mean(starred) <= 0.1


def test_a_true_difference_of_the_detectable_size_is_seen_in_four_of_five(rng):
    case = Case((3, 3), units=1000, shift=-0.41)
    estimates = [estimate(*case.draw(rng)[0][::-1]) for _ in range(200)]
    seen = np.mean([found.interval()[0] > 0 for found in estimates])
    detectable = np.median([found.detectable() for found in estimates])
    assert detectable == pytest.approx(case.truth(), rel=0.2)
    assert 0.65 < seen < 0.92


def test_the_simulation_is_a_command_that_can_fail(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["simulation", "--studies", "40", "--only", "five seeds"])
    monkeypatch.setattr(simulation, "LOWEST", 0.8)  # of so few
    simulation.main()
    assert re.search(r"five seeds +0\.0000 +\d+\.\d%", capsys.readouterr().out)
    monkeypatch.setattr(simulation, "LOWEST", 1.01)
    with pytest.raises(SystemExit, match="outside of .*: five seeds"):
        simulation.main()
