"""Windows to batches: against loops; where the log lies; batches made one ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recbole_pos.data.batch import BatchRequirements, WindowGatherer, fits_on_device, prefetch
from recbole_pos.data.interactions import EventLog
from recbole_pos.data.windows import Windows, training_windows
from recbole_pos.errors import UsageError
from recbole_pos.layers.features import Features

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def example(sizes: list[int], longest: int, stride: int) -> tuple[EventLog, Windows]:
    user = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    fields = {
        "user": user,
        "item": torch.randint(1, 99, (len(user),), generator=torch.Generator().manual_seed(0)),
        "time": torch.arange(len(user), dtype=torch.float64) + 1.5e9,
    }
    log = EventLog.build(fields, len(sizes), "user", "item", "time")
    mode = "sliding" if stride <= longest else "chunk"
    given_stride = stride if mode == "sliding" else None
    windows = training_windows(log.offsets[:-1], log.offsets[1:], longest, mode, given_stride)
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
    found = WindowGatherer(log, windows, requirements, CPU, features).gather(batch)
    events, lengths, positions, targets = [], [], [], []
    for w in batch:
        for event in range(windows.start[w], windows.end[w]):
            if event >= windows.first[w]:
                positions.append(len(events))
                targets.append(log.items[event + 1].item())
            events.append(event)
        lengths.append(int(windows.end[w] - windows.start[w]))
    everything = len(positions) == len(events)
    assert found.positions is None if everything else found.positions.tolist() == positions
    assert found.log_rows.tolist() == events and found.lengths.tolist() == lengths
    assert found.width == max(lengths) and found.targets.tolist() == targets
    assert torch.equal(found.items, log.items[events]) and len(found) == len(targets)
    assert torch.equal(found.times, log.times[events])
    assert torch.equal(found.features.events["price"], log.items[events] * 2.5)
    assert found.features.users["age"].tolist() == log.users[windows.start[batch]].tolist()


@pytest.mark.parametrize(
    ("device", "wanted", "free", "there"),
    [
        (CPU, "always", 10**9, False),
        (GPU, "auto", 10**9, True),
        (GPU, "auto", 200, False),
        (GPU, "always", 200, True),
        (GPU, "always", 100, None),
    ],
    ids=str,
)
def test_a_log_fits_on_device_a_gpu_that_has_room(monkeypatch, device, wanted, free, there) -> None:
    log, windows = example([6], 5, 9)
    size = 6 * 16 + 3 * 8 * len(windows.start)
    assert 100 < size < 200 < 2 * size
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 10**9))
    if there is None:
        with pytest.raises(UsageError, match="data_on_device: always: items and times take"):
            fits_on_device(device, wanted, log, windows, Features())
    else:
        assert fits_on_device(device, wanted, log, windows, Features()) == there


def test_what_fails_in_the_thread_fails_here_and_a_break_leaves_no_thread() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise MemoryError("of the host")

    with pytest.raises(MemoryError, match="of the host"):
        list(prefetch(failing()))
    before = threading.active_count()
    for _ in prefetch(iter(range(5))):
        break
    assert threading.active_count() == before
