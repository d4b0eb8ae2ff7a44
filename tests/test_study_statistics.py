"""Metrics from ranks, differences and their noise, tests."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from study_simulation import Case, cover

from recbole_pos.config.metrics import compute_gains, is_from_ranks
from recbole_pos.errors import UsageError
from recbole_pos.study.power import PairNoise
from recbole_pos.study.results import assign_bins, compute_differences, compute_means
from recbole_pos.study.statistics import (
    RankTable,
    SeedNoise,
    compute_detectable,
    compute_pseudo_values,
    correct_by_holm,
    estimate_difference,
    flip_signs,
)


def table_of(case: Case, rng: np.random.Generator, names: str = "ABCDEFGH") -> RankTable:
    ranks, unit = case.ranks(rng)
    frames = {
        (name, 2020 + seed): pd.DataFrame(
            {"user": unit, "item": np.arange(len(unit)), "rank": rank}
        )
        for name, row in zip(names, ranks, strict=False)
        for seed, rank in enumerate(row)
    }
    return RankTable.from_runs(frames)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def test_metrics_follow_from_ranks():
    rank = np.array([0, 1, 9, 10, np.inf])
    assert compute_gains(rank, "hit@10").tolist() == [1, 1, 1, 0, 0]
    assert compute_gains(rank, "recall@1").tolist() == [1, 0, 0, 0, 0]
    ndcg = [1, 1 / np.log2(3), 1 / np.log2(11), 0, 0]
    assert compute_gains(rank, "NDCG@10") == pytest.approx(ndcg)
    assert compute_gains(rank, "mrr@10") == pytest.approx([1, 0.5, 0.1, 0, 0])
    assert is_from_ranks("NDCG@5") and not is_from_ranks("itemcoverage@10")
    assert not is_from_ranks("ncdg@10") and not is_from_ranks("ndcg@0")


def test_runs_are_compared_target_by_target_whatever_the_order_of_lines_and_seeds():
    frame = pd.DataFrame({"user": [3, 1, 3], "item": [5, 6, 7], "rank": [0, 20, 1]})
    shuffled = frame.sample(frac=1, random_state=1)
    table = RankTable.from_runs({("A", 1): frame, ("B", 1): shuffled})
    assert (table.rank[0] == table.rank[1]).all()
    totals, size = table.sum_gains("hit@10")
    assert size.tolist() == [1, 2] and totals["A"].tolist() == [[0, 2]]
    frames = {("A", seed): pd.DataFrame({"user": [1], "rank": [seed]}) for seed in (7, 2, 5)}
    table = RankTable.from_runs(frames | {("B", 1): frames["A", 7]})
    totals, _ = table.sum_gains("mrr@100")
    assert totals["A"][:, 0].tolist() == [1 / 3, 1 / 6, 1 / 8]
    assert table.list_seeds("A") == [2, 5, 7] and list(totals) == ["A", "B"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"item": [5, 6, 8]}, "B, seed 1 and A, seed 1 cannot be compared"),
        ({"rank": [0, np.nan, 1]}, "ranks of B, seed 1"),
    ],
)
def test_runs_of_other_targets_are_refused(change, message):
    frame = pd.DataFrame({"user": [3, 1, 3], "item": [5, 6, 7], "rank": [0, 20, 1]})
    with pytest.raises(UsageError, match=message):
        RankTable.from_runs({("A", 1): frame, ("B", 1): frame.assign(**change)})


def test_pseudo_values_are_the_jackknife(rng):
    size = rng.integers(1, 30, 12)
    total = rng.random((2, 12)) * size
    brute = [
        12 * total.sum(1) / size.sum()
        - 11 * np.delete(total, unit, 1).sum(1) / np.delete(size, unit).sum()
        for unit in range(12)
    ]
    assert compute_pseudo_values(total, size) == pytest.approx(np.stack(brute, 1))
    assert compute_pseudo_values(total, np.ones(12, dtype=int)) == pytest.approx(total)


def test_where_seeds_do_nothing_it_is_the_paired_t_test(rng):
    row, reference = rng.random(40), rng.random(40)
    found = estimate_difference(np.stack([row] * 3), np.stack([reference] * 3))
    paired = stats.ttest_rel(row, reference)
    assert found.p == pytest.approx(paired.pvalue)
    assert found.interval == pytest.approx(tuple(paired.confidence_interval()))
    assert found.seed_noise == "own"


def test_where_only_seeds_matter_it_is_welchs_t_test(rng):
    row, reference = rng.normal(0, 1, 4), rng.normal(0, 3, 5)
    flat = [np.repeat(side[:, None], 30, axis=1) for side in (row, reference)]
    found, welch = estimate_difference(*flat), stats.ttest_ind(row, reference, equal_var=False)
    assert found.p == pytest.approx(welch.pvalue)
    assert found.df == pytest.approx(welch.df)
    assert found.interval == pytest.approx(tuple(welch.confidence_interval()))


def test_rows_without_noise_between_seeds_are_left_out_of_the_pool(rng):
    noisy, still = rng.random((3, 50)), np.repeat(rng.random((1, 50)), 3, axis=0)
    both = SeedNoise.pool([noisy, still])
    assert both == SeedNoise.pool([noisy])
    rounded = still * np.array([[1.0], [1.0 + 1e-15], [1.0]])  # as sums are
    assert SeedNoise.pool([still]) is SeedNoise.pool([rounded]) is None
    # a row far above the pool has more noise, one below it is not given less
    assert both.add_up([2 * both.level]).between == pytest.approx(4 * both.between)
    assert both.add_up([both.level / 2]) == both


def test_rows_that_share_seeds_are_compared_seed_by_seed(rng):
    base = rng.normal(0, 1, (3, 1)) + rng.random((3, 60))
    attached = base + 0.01 + rng.normal(0, 0.001, (3, 60))
    apart = estimate_difference(attached, base)
    together = estimate_difference(attached, base, is_coupled=True)
    assert together.error < 0.01 * apart.error and together.difference == apart.difference
    assert estimate_difference(attached[:1], base[:1], is_coupled=True).seed_noise == "unknown"


def test_where_nothing_differs_nothing_is_known():
    nothing, pooled = np.zeros((3, 20)), SeedNoise(1e-6, 0.0, 4, 0.1)
    for found in (
        estimate_difference(nothing, nothing),
        estimate_difference(nothing[:1], nothing, pooled),
    ):
        assert found.difference == 0 and np.isnan(found.error) and np.isnan(found.p)
    assert np.isnan(estimate_difference(np.ones((2, 1)), np.zeros((2, 1))).error)


def test_sign_flips_are_exact_for_few_units(rng):
    values = rng.normal(0.4, 1, 9)
    every_flip = {"permutation_type": "samples", "n_resamples": np.inf}
    exact = stats.permutation_test((values,), np.sum, **every_flip)
    assert flip_signs(values[:, None])[0] == pytest.approx(exact.pvalue)
    # units that do not differ change nothing; all to one side is 2 of 2^n
    assert flip_signs(np.r_[values, 0, 0, 0, 0, 0, 0][:, None])[0] == pytest.approx(exact.pvalue)
    assert flip_signs(np.ones((5, 1)))[0] == 2 / 2**5
    assert flip_signs(np.zeros((5, 1)))[0] == 1


def test_sign_flips_of_many_units(rng):
    values = rng.normal(0, 1, (3000, 3)) + np.array([0, 0.04, 1])
    found = flip_signs(values)
    normal = 2 * stats.norm.sf(np.abs(values.sum(0)) / np.sqrt((values**2).sum(0)))
    assert found[:2] == pytest.approx(normal[:2], abs=0.02)
    assert found[2] == 1 / 10_000
    assert (flip_signs(values) == found).all()  # the same flips each time


def test_the_correction_of_holm():
    found = correct_by_holm(np.array([0.04, np.nan, 0.01, 0.03]))
    assert found == pytest.approx([0.06, np.nan, 0.03, 0.06], nan_ok=True)
    assert correct_by_holm(np.array([0.5, 0.9])).tolist() == [1.0, 1.0]


def test_differences_are_those_of_the_means(rng):
    table = table_of(Case((3, 2, 1), units=300, targets=3.0), rng)
    mean = compute_means(table, "ndcg@10").set_index("row")
    found = compute_differences(table, "ndcg@10", "A", "BC").set_index("row")
    assert list(found.index) == ["B", "C"]
    expected = mean["mean"] - mean["mean"]["A"]
    assert found["difference"].to_dict() == pytest.approx(expected.drop("A").to_dict())
    assert found["seed_noise"].to_dict() == {"B": "own", "C": "pooled"}
    assert (found["units"] == 300).all() and (found["targets"] == len(table.targets)).all()
    assert np.isnan(mean["deviation"]["C"]) and mean["seeds"].tolist() == [3, 2, 1]


def test_rows_of_the_same_models_count_once_in_the_pool(rng):
    table = table_of(Case((1, 1, 3), units=300), rng)
    twin = pd.DataFrame({"row": ["D"] * 3, "seed": [2020, 2021, 2022]})
    runs = pd.concat([table.runs, twin], ignore_index=True)
    both = RankTable(runs, table.targets, np.vstack([table.rank, table.rank[2:]]))
    alone = compute_differences(table, "ndcg@10", "A", "B")
    loose = compute_differences(both, "ndcg@10", "A", "B")
    are_twins = lambda a, b: {a, b} == {*"CD"}  # noqa: E731
    bound = compute_differences(both, "ndcg@10", "A", "B", are_coupled=are_twins)
    assert alone["df"][0] == bound["df"][0] < loose["df"][0]


def test_rows_of_the_same_models_are_compared_by_the_seeds_of_both(rng):
    table = table_of(Case((2, 3), units=300), rng)
    shared = compute_differences(table, "ndcg@10", "A", "B", are_coupled=lambda a, b: True)
    assert (shared["seeds"][0], shared["reference_seeds"][0]) == (2, 2)


def test_a_star_needs_two_seeds_on_both_sides(rng):
    table = table_of(Case((2, 2, 1), units=3000, shift=-1.5, of_seed=0.02), rng)
    same = pd.concat([table.runs, table.runs[:1].assign(row="D")], ignore_index=True)
    table = RankTable(same, table.targets, np.vstack([table.rank, table.rank[2]]))
    found = compute_differences(table, "ndcg@10", "A", "BCD").set_index("row")
    assert found.loc["B", "star"] and found.loc["B", "p_holm"] < 0.05
    assert found.loc["D", "p_holm"] < 0.05 and not found.loc["D", "star"]
    assert not found.loc["C", "star"]
    assert not compute_differences(table, "ndcg@10", "D", "A")["star"].any()


def test_bins_are_compared_on_their_targets_alone(rng):
    table = table_of(Case((2, 2), units=200), rng)
    first = np.arange(200) < 50
    bins = {"first": first, "rest": ~first, "none": np.zeros(200, dtype=bool)}
    found = compute_differences(table, "hit@10", "A", "B", bins).set_index("bin")
    assert found["targets"].to_dict() == {"first": 50, "rest": 150, "none": 0}
    whole = compute_differences(table, "hit@10", "A", "B")["difference"][0]
    parts = found["difference"]["first"] * 50 + found["difference"]["rest"] * 150
    assert parts / 200 == pytest.approx(whole)
    assert np.isnan(found["difference"]["none"]) and not found["star"]["none"]
    empty = compute_means(table, "hit@10", bins).set_index("bin").loc["none"]
    assert empty["mean"].isna().all()


# generated studies; `make simulate` has more of them


STUDIES = 300  # a share of 0.95 has a standard error of 0.0126 in so many


@pytest.mark.parametrize(
    "case",
    [
        Case((3, 3), units=500),
        Case((2, 2), units=60, targets=20.0),
        Case((1, 1, 3, 3, 3), units=500, shift=-0.5),
        # noise of seeds on targets is most of the noise, and counts once
        Case((3, 3), units=500, of_seed_on_target=2.0),
    ],
    ids=["three seeds", "few users", "one seed, better", "noisy targets"],
)
def test_intervals_cover_the_truth(case):
    rate, above = cover(case, STUDIES)
    assert 0.95 - 3 * 0.0126 < rate <= 0.995 and above < 0.05


def test_a_true_difference_of_the_detectable_size_is_seen_in_four_of_five(rng):
    case = Case((3, 3), units=1000, shift=-0.41)
    estimates = [estimate_difference(*case.draw(rng)[0][::-1]) for _ in range(200)]
    seen = np.mean([found.interval[0] > 0 for found in estimates])
    detectable = np.median([compute_detectable(found.error, found.df) for found in estimates])
    assert detectable == pytest.approx(case.truth(), rel=0.2)
    assert 0.65 < seen < 0.92


def test_a_plan_says_what_the_study_then_finds():
    """For as many seeds as there are, the same formula; for more, what larger studies have."""

    def simulate(seed: int, num_seeds: int) -> tuple[np.ndarray, np.ndarray, float]:
        ranks, _ = Case(seeds=(num_seeds, num_seeds)).ranks(np.random.default_rng(seed))
        row, reference = (compute_gains(row_ranks, "ndcg@10") for row_ranks in ranks)
        estimate = estimate_difference(row, reference)
        return row, reference, compute_detectable(estimate.error, estimate.df)

    row, reference, detectable = simulate(0, 3)
    noise = PairNoise.from_values(row, reference)
    assert noise.predict_detectable(3) == pytest.approx(detectable, rel=1e-9)
    values = [noise.predict_detectable(number) for number in range(2, 11)]
    assert values == sorted(values, reverse=True)
    assert noise.count_needed_seeds(values[5] * 1.0001) == 7
    assert noise.count_needed_seeds(1e-9) is None
    alike = PairNoise.from_values(reference, reference)
    assert alike.true_variance == 0 and alike.predict_detectable(3) < detectable

    # planned from three seeds, on average, what studies of eight seeds have
    studies = [simulate(number, 8) for number in range(20)]
    planned = [PairNoise.from_values(a[:3], b[:3]).predict_detectable(8) for a, b, _ in studies]
    assert np.median(planned) == pytest.approx(np.median([d for *_, d in studies]), rel=0.15)


def test_every_target_is_in_one_bin_of_each_kind():
    targets = pd.DataFrame({"history": [1, 5, 6, 15, 16, 99], "popularity": [0, 1, 2, 3, 0, 9]})
    targets["age"] = [0.0, 59.0, 60.0, 60.5, 3600.0, 9e9]  # seconds
    targets["habit"] = [np.nan, 0.0, 5.0, 10.0, 99.0, 100.0]  # without earlier ones in no bin
    assert sum(assign_bins(targets, {"habit": [9]})["habit"].values()).tolist() == [0] + 5 * [1]
    bins = {"history": [5, 15], "age": [60, 3600], "popularity": [2], "cold": True}
    found = assign_bins(targets, bins)
    for bins in found.values():
        assert (np.stack(list(bins.values())).sum(0) == 1).all()
    assert found["history"]["history 6 to 15"].tolist() == [False, False, True, True, False, False]
    assert found["age"]["age 1 min to 1 h"].tolist() == [False, False, False, True, True, False]
    assert found["cold"]["cold items"].sum() == 2
