"""Batches of few shapes, which a GPU can replay: sizes rounded up, filled with padding sequences.

A step that is replayed must have the sizes with which it was recorded. So sizes are rounded up to
a few steps, and further sequences of the padding item fill the batch; they have no target. Batches
of an epoch have about equal numbers of targets, so steps of events and targets are laid around the
mean, which depends on the windows of a run only: all epochs, and a resumed run, have the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from recbole_pos.data.batch import SequenceBatch
from recbole_pos.data.windows import Windows
from recbole_pos.values import Options

EVENTS = 16  # steps to the mean number of events of a batch
BLOCKS = 4  # steps from a power of two to the next, of sequences and width: attention alone pays
TRIES = 3  # steps up at most for events enough that each further sequence has one


def fixed_shapes(config: Options) -> bool:
    """Return whether batches have few shapes; ``auto`` is ``exact``, which was faster where
    measured."""
    return bool(config["batch_shapes"] == "fixed")


def rounded(n: int, steps: int) -> int:
    """Return the next of the numbers of which ``steps`` lie between a power of two and the next."""
    step = max(1, (1 << max(n - 1, 1).bit_length() - 1) // steps)
    return -(-n // step) * step


@dataclass(frozen=True)
class Grid:
    """Which sizes a batch of a run may have.

    Attributes:
        longest: the most events that a window of the run may have.
        events, targets: targets of a batch on average.
    """

    longest: int
    events: int
    targets: int

    @classmethod
    def of(cls, windows: Windows, batches: float, longest: int) -> Grid:
        """Return that of an epoch's windows in so many ``batches``."""
        events = int(windows.lengths.sum())
        return cls(longest, int(events / batches), int(windows.targets / batches))


def around(n: int, mean: int) -> int:
    """The next of the numbers that lie an ``EVENTS``-th of ``mean`` apart, the mean between two."""
    step = max(1, mean // EVENTS)
    first = (mean + step // 2) % step
    return first - (first - n) // step * step


@dataclass(frozen=True)
class Shape:
    """What a batch is filled up to.

    Attributes:
        events: M > m.
        sequences: B > b; those that are added have an event at least, and ``width`` at most.
        width: T.
        targets: K.
    """

    events: int
    sequences: int
    width: int
    targets: int

    @classmethod
    def of(cls, batch: SequenceBatch, grid: Grid) -> Shape:
        """Return the next in the grid of a batch's own."""
        m, b, k = batch.items.numel(), batch.lengths.numel(), batch.targets.numel()
        width = min(rounded(batch.width, BLOCKS), grid.longest)
        events = m
        for _ in range(TRIES):
            events = around(events + 1, grid.events)
            sequences = rounded(b + -(-(events - m) // width), BLOCKS)
            if sequences - b <= events - m:
                break
        sequences = min(sequences, b + events - m)
        targets = events if batch.positions is None else around(k, grid.targets)
        return cls(events, sequences, width, targets)


def filled(batch: SequenceBatch, grid: Grid) -> SequenceBatch:
    """Return a batch with sizes of ``grid``, where it lies: events and targets of padding behind,
    and which targets are ``real``.
    """
    m, b, k = batch.items.numel(), batch.lengths.numel(), batch.targets.numel()
    shape, device = Shape.of(batch, grid), batch.items.device
    more, rows = shape.events - m, torch.arange(shape.sequences - b, device=device)
    each, left = divmod(more, len(rows))
    positions, times, at = batch.positions, batch.times, batch.at
    if positions is not None:
        positions = F.pad(positions, (0, shape.targets - k), value=shape.events - 1)
    if times is not None:  # no gap that a user could not have had
        times = torch.cat((times, times[-1:].expand(more)))
    if at is not None:
        at = torch.cat((at, at[-1:].expand(len(rows))))
    wider = (lambda x, n=n: torch.cat((x, x.new_zeros(n, *x.shape[1:]))) for n in (more, len(rows)))
    return replace(
        batch,
        items=F.pad(batch.items, (0, more)),
        lengths=torch.cat((batch.lengths, each + (rows < left).to(batch.lengths.dtype))),
        targets=F.pad(batch.targets, (0, shape.targets - k), value=1),
        width=shape.width,
        positions=positions,
        times=times,
        at=at,
        features=batch.features.map(*wider),
        real=torch.arange(shape.targets, device=device) < k,
        count=k,
    )
