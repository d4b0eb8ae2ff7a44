"""Training windows, their batches and the loaders of these, against brute force."""

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CROSS_ENTROPY
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recbole_pos.config.options import find_option
from recbole_pos.data.interactions import EventLog, sort_interactions
from recbole_pos.data.loaders import WindowLoader
from recbole_pos.data.windows import (
    BatchRequirements,
    WindowGatherer,
    Windows,
    cut_windows,
    fits_on_device,
    prefetch,
)
from recbole_pos.distributed import Shard
from recbole_pos.errors import UsageError
from recbole_pos.layers.sequence_batch import Features
from recbole_pos.model.training import make_adapter

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
    windows = cut_windows(start, end, longest, mode, stride)
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
    longest_back = longest if mode == "last" else len(end) * 30
    want = {
        target
        for s, e in zip(start, end, strict=True)
        for target in range(max(s + 1, e - longest_back), e)
    }
    assert set(trained) == want and max(trained.values(), default=1) == 1
    assert windows.num_targets.sum() == len(want)


def test_the_stride_is_half_of_a_window_or_given_and_at_most_a_window() -> None:
    user = np.array([0]), np.array([30])
    one, two = (cut_windows(*user, 7, "sliding", stride) for stride in (None, 3))
    assert np.array_equal(one.first, two.first) and np.array_equal(one.start, two.start)
    with pytest.raises(UsageError, match="window_stride: expected 1 to"):
        cut_windows(*user, 5, "sliding", 6)


def open_loader(experiment, model: str = "PosSASRec", **options: Any) -> WindowLoader:
    made = experiment(model, **options)
    loader = made.trainer.training_loader(made.loaders["train"])
    assert isinstance(loader, WindowLoader)
    return loader


@pytest.mark.parametrize(("mode", "pool"), [("chunk", 1), ("sliding", 3)])
def test_an_epoch_has_every_window_once(experiment, mode: str, pool: int) -> None:
    """Another epoch has another order."""
    loader = open_loader(experiment, train_windows=mode, length_pool=pool, train_batch_size=7)
    batches = loader._get_batches()
    assert sorted(np.concatenate(batches)) == list(range(len(loader.windows.start)))
    assert sum(len(batch) for batch in loader) == loader.num_targets
    loader.set_epoch(1)
    assert not all(map(np.array_equal, batches, loader._get_batches()))
    loader.set_epoch(0)
    assert all(map(np.array_equal, batches, loader._get_batches()))


def test_batches_are_of_like_lengths_in_random_order(experiment) -> None:
    loader = open_loader(experiment, length_pool=50, train_batch_size=8)
    lengths = [loader.windows.lengths[batch] for batch in loader._get_batches()]
    spans = [(one.min(), one.max()) for one in lengths]
    ordered = sorted(spans)
    assert len(spans) > 4 and spans != ordered
    assert all(one[1] <= two[0] for one, two in itertools.pairwise(ordered))


@pytest.mark.parametrize(("mode", "most"), [("chunk", 1), ("sliding", 7), ("prefix", 30)])
def test_no_batch_has_more_events_than_it_may(experiment, mode: str, most: int) -> None:
    """A longer window stands by itself; no batch is cut where it fits."""
    options = {"train_windows": mode, "train_batch_size": 16, "length_pool": 3}
    loader = open_loader(experiment, **options, train_batch_events=most)
    batches, whole = loader._get_batches(), open_loader(experiment, **options)._get_batches()
    assert sorted(np.concatenate(batches)) == list(range(len(loader.windows.start)))
    lengths = loader.windows.lengths
    assert all(lengths[batch].sum() <= most or len(batch) == 1 for batch in batches)
    fit = {tuple(batch) for batch in whole if lengths[batch].sum() <= most}
    assert fit <= {tuple(batch) for batch in batches}
    assert most < 30 or len(batches) <= 2 * lengths.sum() / most + len(whole)


def test_every_process_has_as_many_of_the_batches_that_were_cut(experiment) -> None:
    loader = open_loader(experiment, train_batch_size=16, train_batch_events=20)
    steps, targets = set(), 0
    for rank in range(3):
        loader.shard = Shard()  # as another process would begin
        loader.divide(Shard(rank, 3))
        own = [loader.shard.num_targets for _ in loader]
        steps.add(len(own))
        targets += sum(own)
    assert steps == {len(loader)} and targets == loader.num_targets


def test_linked_windows_of_a_user_are_in_one_batch(experiment) -> None:
    """However many events they have."""
    given = {"train_batch_events": 10, "MAX_ITEM_LIST_LENGTH": 4}
    loader = open_loader(experiment, "AttrFormer", **given)
    of_window = loader.log.users[loader.windows.start]
    users = [of_window[batch].unique().tolist() for batch in loader._get_batches()]
    assert sum(map(len, users)) == len(of_window.unique())
    events = [int(loader.windows.lengths[batch].sum()) for batch in loader._get_batches()]
    assert all(n <= 10 or len(one) == 1 for n, one in zip(events, users, strict=True))
    assert max(events) > 10


def compute(model: Any, loss: Any, batch: Any) -> list[Tensor]:
    torch.manual_seed(3)
    value = loss(batch)
    return [value, *torch.autograd.grad(value, list(model.parameters()), allow_unused=True)]


@pytest.mark.parametrize(
    ("name", "options"),
    [("PosRec", {"anchors": True}), ("AttrFormer", CROSS_ENTROPY["AttrFormer"])],
    ids=str,
)
def test_windows_prepared_on_the_host(experiment, name: str, options: dict[str, Any]) -> None:
    """The same loss and gradients to the bit: the same operations, some of them earlier."""
    made = experiment(name, **options)
    model = made.model.train()
    batch = next(iter(made.trainer.training_loader(made.loaders["train"])))
    prepare = made.trainer.adapter.requirements().prepare
    values = compute(model, lambda batch: model.window_loss(prepare(batch)), batch)
    for value, other in zip(values, compute(model, model.window_loss, batch), strict=True):
        assert (value is other is None) or torch.equal(value, other)


@pytest.mark.parametrize("name", ["TORoPE", "FGNN", "AttrFormer"])
def test_rows_packed_on_the_host(experiment, name: str) -> None:
    options = {"chunking": False} if name == "AttrFormer" else {}
    made = experiment(name, MAX_ITEM_LIST_LENGTH=9, augmentation="prefix", **options)
    model = made.model.train()
    whole = made.loaders["train"]._dataset
    rows = whole[np.flatnonzero(whole.inter_feat[model.ITEM_SEQ_LEN].numpy() < 7)[:20]]
    requirements = made.trainer.adapter.requirements()
    packed = requirements.pack(rows)
    assert packed.width <= 6 and rows[model.ITEM_SEQ].size(1) == 9
    loss = made.trainer.adapter.choose_loss(packed=False)
    values = compute(model, lambda rows: loss(requirements.pack(rows)), rows)
    for value, other in zip(values, compute(model, loss, rows), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-7)


def test_a_custom_model_keeps_its_own_loss_of_rows(experiment) -> None:
    made = experiment("FPARec", augmentation="prefix")
    assert make_adapter(made.config, made.model).requirements().pack is not None
    own = {"calculate_loss": lambda self, rows: 0}
    made.model.__class__ = type("Mine", (type(made.model),), own)
    assert make_adapter(made.config, made.model).requirements().pack is None


def test_what_fails_in_the_thread_fails_here_and_a_break_leaves_no_thread() -> None:
    def fail() -> Iterator[int]:
        yield 1
        raise MemoryError("of the host")

    with pytest.raises(MemoryError, match="of the host"):
        list(prefetch(fail()))
    before = threading.active_count()
    for _ in prefetch(iter(range(1, 5))):
        break
    assert threading.active_count() == before


CPU = torch.device("cpu")


def example(sizes: list[int], longest: int, stride: int) -> tuple[EventLog, Windows]:
    user = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    fields = {
        "user": user,
        "item": torch.randint(1, 99, (len(user),), generator=torch.Generator().manual_seed(0)),
        "time": torch.arange(len(user), dtype=torch.float64) + 1.5e9,
    }
    log, _ = sort_interactions(fields, len(sizes), "user", "item", "time")
    mode = "sliding" if stride <= longest else "chunk"
    given_stride = stride if mode == "sliding" else None
    windows = cut_windows(log.offsets[:-1], log.offsets[1:], longest, mode, given_stride)
    return log, windows


@given(
    st.lists(st.integers(2, 12), min_size=1, max_size=6),
    st.integers(1, 6),
    st.integers(1, 9),
    st.lists(st.integers(0, 99), min_size=1, max_size=8),
)
def test_a_batch_is_what_loops_make_of_it(sizes, longest, stride, places) -> None:
    log, windows = example(sizes, longest, stride)
    batch = np.array(places) % len(windows.start)
    features = Features({"price": log.items * 2.5}, {"age": torch.arange(99)})
    requirements = BatchRequirements(times=True, log_rows=True)
    gatherer = WindowGatherer(log, windows, requirements, CPU, features)
    found = gatherer.gather(batch, torch.from_numpy(batch))
    events, lengths, positions, targets = [], [], [], []
    for w in batch:
        for event in range(windows.start[w], windows.end[w]):
            if event >= windows.first[w]:
                positions.append(len(events))
                targets.append(log.items[event + 1].item())
            events.append(event)
        lengths.append(int(windows.end[w] - windows.start[w]))
    everything = len(positions) == len(events)
    assert found.queries is None if everything else found.queries.tolist() == positions
    assert found.log_rows.tolist() == events and found.lengths.tolist() == lengths
    assert found.width == max(lengths) and found.targets.tolist() == targets
    assert torch.equal(found.items, log.items[events]) and len(found) == len(targets)
    assert torch.equal(found.times, log.times[events])
    assert torch.equal(found.features.events["price"], log.items[events] * 2.5)
    assert found.features.users["age"].tolist() == log.users[windows.start[batch]].tolist()


@pytest.mark.parametrize(("free", "there"), [(10**9, True), (200, False)])
def test_a_log_fits_on_device_a_gpu_that_has_room(monkeypatch, free, there) -> None:
    """On one with twice the bytes of items, times and windows."""
    log, windows = example([6], 5, 9)
    num_bytes = 6 * (8 + 8) + 3 * 8 * len(windows.start)
    assert 100 < num_bytes < 200 < 2 * num_bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 10**9))
    assert fits_on_device(torch.device("cuda"), log, windows, Features()) == there
