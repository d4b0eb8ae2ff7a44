"""Batches of few shapes, which a GPU can replay: sizes rounded up, filled with nobody's events.

A batch has m events, b sequences of at most t events and k targets, and hardly ever the sizes of
another. A step that is replayed as it was recorded must have the sizes that it had then. So sizes
are rounded up to a few steps, and further sequences of the padding item fill the batch. They are
sequences like any other: nothing that keeps sequences apart has to know of them. Nothing is learned
from them, since no target is theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from recbole_pos.data.batch import SequenceBatch
from recbole_pos.values import Options

EVENTS = 8  # steps between a power of two and the next: of 12.5% at most, 6% on average
BLOCKS = 4  # the same of sequences and width, which attention alone pays for


def fixed_shapes(config: Options) -> bool:
    """``batch_shapes``; ``auto`` is for steps that are compiled and replayed."""
    wanted = config["batch_shapes"]
    replayed = config["compile"] and config["device"].type == "cuda"
    return bool(wanted == "fixed" or (wanted == "auto" and replayed))


def rounded(n: int, steps: int) -> int:
    """The next of the numbers of which ``steps`` lie between a power of two and the next."""
    step = max(1, (1 << max(n - 1, 1).bit_length() - 1) // steps)
    return -(-n // step) * step


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
    def of(cls, batch: SequenceBatch, longest: int) -> Shape:
        """Of a batch whose windows have ``longest`` events at most."""
        m, b, k = batch.items.numel(), batch.lengths.numel(), batch.targets.numel()
        width = min(rounded(batch.width, BLOCKS), longest)
        events, sequences = rounded(m + 1, EVENTS), b + 1
        while True:
            sequences = rounded(max(sequences, b - (m - events) // width), BLOCKS)
            if events - m >= sequences - b:
                break
            events = rounded(m + sequences - b, EVENTS)
        targets = events if batch.positions is None else rounded(k, EVENTS)
        return cls(events, sequences, width, targets)


def filled(batch: SequenceBatch, longest: int) -> SequenceBatch:
    """A batch with sizes of few, where it lies; nothing is read from there.

    Args:
        batch: of windows, unpadded.
        longest: the most events that a window of the run may have.

    Returns:
        The same with events and targets of nobody behind, and which targets are ``real``.
    """
    m, b, k = batch.items.numel(), batch.lengths.numel(), batch.targets.numel()
    shape, device = Shape.of(batch, longest), batch.items.device
    more, rows = shape.events - m, torch.arange(shape.sequences - b, device=device)
    each, left = divmod(more, len(rows))
    positions, times = batch.positions, batch.times
    if positions is not None:
        positions = F.pad(positions, (0, shape.targets - k), value=shape.events - 1)
    if times is not None:  # no gap that a user could not have had
        times = torch.cat((times, times[-1:].expand(more)))
    return replace(
        batch,
        items=F.pad(batch.items, (0, more)),
        lengths=torch.cat((batch.lengths, each + (rows < left).to(batch.lengths.dtype))),
        targets=F.pad(batch.targets, (0, shape.targets - k), value=1),
        width=shape.width,
        positions=positions,
        times=times,
        real=torch.arange(shape.targets, device=device) < k,
        count=k,
    )
