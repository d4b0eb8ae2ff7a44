"""Training windows and the loader of packed batches, against brute force."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recbole_pos.config.options import find_option
from recbole_pos.data.loaders import WindowLoader
from recbole_pos.data.windows import gather_index, training_windows
from recbole_pos.distributed import Shard
from recbole_pos.errors import UsageError

window_case = st.tuples(
    st.lists(st.integers(0, 30), min_size=1, max_size=6),
    st.integers(1, 9),
    st.sampled_from(find_option("train_windows").choices),
)


@settings(max_examples=200)
@given(window_case, st.data())
def test_windows_train_every_event_once(case, data) -> None:
    sizes, longest, mode = case
    stride = data.draw(st.integers(1, longest)) if mode == "sliding" else None
    end = np.cumsum(sizes)
    start = end - sizes
    windows = training_windows(start, end, longest, mode, stride)
    trained = Counter()
    for s, first, e in zip(windows.start, windows.first, windows.end, strict=True):
        user = int(np.searchsorted(end, s, "right"))
        assert start[user] <= s <= first < e < end[user]  # inside one user, target e included
        assert e - s <= longest
        if mode == "sliding" and s > start[user]:
            assert e - s == longest and first - s == longest - stride  # full context
        if mode == "prefix":
            assert first == e - 1 and s == max(start[user], e - longest)
        trained.update(range(first + 1, e + 1))
    if mode == "last":
        want = {
            t for s, e in zip(start, end, strict=True) for t in range(max(s + 1, e - longest), e)
        }
    else:
        want = {t for s, e in zip(start, end, strict=True) for t in range(s + 1, e)}
    assert set(trained) == want and max(trained.values(), default=1) == 1
    assert windows.counts.sum() == len(want)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 6)), min_size=1, max_size=8))
def test_gather_index(windows: list[tuple[int, int]]) -> None:
    start, length = (np.array(x) for x in zip(*windows, strict=True))
    want = [s + k for s, n in windows for k in range(n)]
    assert gather_index(start, length).tolist() == want


def test_augmentation_none_keeps_one_row_per_user(experiment) -> None:
    rows = experiment("SASRec", augmentation="none").loaders["train"]._dataset.inter_feat
    users = rows["user_id"].tolist()
    assert len(users) == len(set(users)) > 50


@pytest.mark.parametrize("pool", [1, 3])
@pytest.mark.parametrize("mode", ["chunk", "sliding"])
def test_window_loader_covers_an_epoch(experiment, mode: str, pool: int) -> None:
    """Every window once; targets follow their inputs; another epoch has another order."""
    made = experiment("PosSASRec", train_windows=mode, length_pool=pool, train_batch_size=7)
    loader = made.trainer.training_loader(made.loaders["train"])
    assert isinstance(loader, WindowLoader)
    batches = loader._batches()
    assert sorted(np.concatenate(batches)) == list(range(len(loader.windows.start)))
    assert sum(len(batch) for batch in loader) == loader.targets
    log = made.dataset.log
    for window in batches[0]:
        batch = loader.gather(np.array([window]))
        s, f, e = (int(getattr(loader.windows, k)[window]) for k in ("start", "first", "end"))
        assert batch.items.tolist() == log.items[s:e].tolist()
        assert batch.targets.tolist() == log.items[f + 1 : e + 1].tolist()
    loader.set_epoch(1)
    assert not all(map(np.array_equal, batches, loader._batches()))
    loader.set_epoch(0)
    assert all(map(np.array_equal, batches, loader._batches()))


def test_stride_of_sliding_windows() -> None:
    """Half of a window when it is not given; new targets are at most a window."""
    with pytest.raises(UsageError, match="window_stride: expected 1 to"):
        training_windows(np.array([0]), np.array([30]), 5, "sliding", 6)
    for longest, stride in ((6, 3), (7, 3), (1, 1)):
        one, two = (
            training_windows(np.array([0]), np.array([30]), longest, "sliding", given)
            for given in (None, stride)
        )
        assert np.array_equal(one.first, two.first) and np.array_equal(one.start, two.start)


def test_batches_are_of_like_lengths_in_random_order(experiment) -> None:
    made = experiment("PosSASRec", length_pool=50, train_batch_size=8)
    loader = made.trainer.training_loader(made.loaders["train"])
    lengths = [loader.windows.lengths[batch] for batch in loader._batches()]
    spans = [(one.min(), one.max()) for one in lengths]
    assert len(spans) > 4 and spans != sorted(spans)
    ordered = sorted(spans)
    assert all(one[1] <= two[0] for one, two in zip(ordered, ordered[1:], strict=False))


@pytest.mark.parametrize(
    ("mode", "most"), [("chunk", 1), ("chunk", 30), ("sliding", 7), ("prefix", 30)]
)
def test_no_batch_has_more_events_than_it_may(experiment, mode: str, most: int) -> None:
    """Every target once; a longer window is alone; no batch is cut where it fits."""
    options = {"train_windows": mode, "train_batch_size": 16, "length_pool": 3}
    made = experiment("PosSASRec", **options, train_batch_events=most)
    loader = made.trainer.training_loader(made.loaders["train"])
    loader.set_epoch(1)
    batches = loader._batches()
    assert sorted(np.concatenate(batches)) == list(range(len(loader.windows.start)))
    assert sum(len(batch) for batch in loader) == loader.targets
    events = np.array([loader.windows.lengths[batch].sum() for batch in batches])
    assert all(n <= most or len(batch) == 1 for n, batch in zip(events, batches, strict=True))
    whole = _unbound(experiment, options, 1)
    fit = {tuple(b) for b in whole if loader.windows.lengths[b].sum() <= most}
    assert fit <= {tuple(batch) for batch in batches}
    if most > loader.windows.lengths.max():
        assert len(batches) <= 2 * events.sum() / most + len(whole)


def _unbound(experiment, options: dict, epoch: int) -> list[np.ndarray]:
    made = experiment("PosSASRec", **options)
    loader = made.trainer.training_loader(made.loaders["train"])
    loader.set_epoch(epoch)
    return loader._batches()


def test_every_process_has_as_many_of_the_batches_that_were_cut(experiment) -> None:
    made = experiment("PosSASRec", train_batch_size=16, train_batch_events=20)
    steps, targets = set(), 0
    for rank in range(3):
        loader = made.trainer.training_loader(made.loaders["train"])
        loader.shard = Shard()  # as another process would begin
        loader.divide(Shard(rank, 3))
        own = [loader.shard.own for _ in loader]
        steps.add(len(own))
        targets += sum(own)
    assert steps == {len(loader)} and targets == loader.targets


def test_sequences_that_read_each_other_stay_together(experiment) -> None:
    """All windows of a user are in one batch, however many events they have."""
    made = experiment("AttrFormer", train_batch_events=10, MAX_ITEM_LIST_LENGTH=4)
    loader = made.trainer.training_loader(made.loaders["train"])
    of_window = made.dataset.log.users[loader.windows.start]
    users = [of_window[batch].unique().tolist() for batch in loader._batches()]
    assert sum(map(len, users)) == len(of_window.unique())
    events = [int(loader.windows.lengths[batch].sum()) for batch in loader._batches()]
    assert all(n <= 10 or len(one) == 1 for n, one in zip(events, users, strict=True))
    assert max(events) > 10
