"""Warnings before training, and the watch over losses during it, which stops at a bad one."""

from __future__ import annotations

import logging
import math
import os
import traceback
from collections import deque
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from recbole_pos.distributed import current_shard
from recbole_pos.errors import TrainingError
from recbole_pos.layers.hooks import PositionScheme
from recbole_pos.layers.sequence_batch import SequenceBatch
from recbole_pos.model.base import PosRecommender
from recbole_pos.model.models import MODELS
from recbole_pos.position.schemes import SCHEMES

LATE = 4  # steps between computing a loss on a GPU and reading it
_MIN_CHANGE = 1e-5  # relative change of states; rounding changes them less


def log_notices(model: nn.Module, trains_every_position: bool) -> None:
    """Log warnings about a model before it is trained, in the first process only.

    These are the model's own ``notices`` about its data and options, and a warning if custom code
    in it looks ahead, see :func:`_describe_lookahead`.

    Args:
        model: the model; nothing of it is changed.
        trains_every_position: whether every position of an input has a target; only then does
            looking ahead matter.
    """
    if current_shard().rank != 0:  # the rank is the number of the process
        return
    notices = list(getattr(model, "notices", ()))
    lookahead = _describe_lookahead(model) if trains_every_position else None
    if lookahead is not None:
        notices.append(lookahead)
    for notice in notices:
        logging.getLogger(__name__).warning(notice)


def _describe_lookahead(model: nn.Module) -> str | None:
    """Test whether custom code in a model looks ahead, and return a warning if it does.

    A model looks ahead if its state at a position depends on later interactions. These are what it
    is to predict from that state. Classes of this package are not tested.

    Returns:
        The warning; None if nothing looks ahead, or the model cannot be tested.
    """
    # Custom classes are those of other packages: of the model, or of its position schemes (the
    # modules that encode positions).
    schemes = [module for module in model.modules() if isinstance(module, PositionScheme)]
    classes = {type(module) for module in (model, *schemes)}
    custom = [cls.__name__ for cls in classes if not cls.__module__.startswith("recbole_pos.")]

    # A model is not tested if it says itself that it is not causal, or if it reads the histories
    # of other users (``needs_events``), which the test does not make.
    is_testable = isinstance(model, PosRecommender) and model.causal and not model.needs_events
    if not custom or not is_testable:
        return None
    try:
        change = looks_ahead(model)  # of the states, relative to their size
    except Exception:  # training will raise the same error, with a better message
        return None
    if change > _MIN_CHANGE:  # more than rounding
        return (
            f"{', '.join(sorted(custom))}: looks ahead. When only later interactions change, the "
            f"states of earlier ones move by {change:.1g} of their size; trained at every "
            "position, the model sees what it is to predict. Make it causal "
            "(docs/add_a_scheme.md), or train it with augmentation: prefix; a model that must "
            "see all of a session sets causal = False"
        )
    return None


def locate_in_custom_code(error: BaseException) -> str | None:
    """Find where in custom code an exception was raised, or passed through.

    Custom code is the modules of registered models and position schemes.

    Args:
        error: the exception, with its traceback.

    Returns:
        The innermost such place, as "mine.py, line 12"; None if there is none.
    """
    # MODELS has models, SCHEMES position schemes; ``added`` are the custom ones by name.
    registrations = (*MODELS.added.values(), *SCHEMES.added.values())
    modules = {registration.cls.__module__ for registration in registrations}

    # The traceback goes from the outermost call to the innermost; the last place found wins.
    location = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") in modules:
            location = f"{os.path.basename(frame.f_code.co_filename)}, line {line}"
    return location


def looks_ahead(model: Any) -> float:
    """Measure how much a model's states of older interactions change if only newer ones change.

    A PosRecommender encodes a history as one state for each interaction. A causal model computes
    the state from that interaction and older ones only. Here two random histories are encoded, and
    encoded again with other items at other times in their newer halves. The states of the older
    halves are compared.

    Args:
        model: the model. Its weights, its mode (training or evaluation) and the state of random
            numbers are the same afterwards.

    Returns:
        The largest change of these states, divided by the largest state. It is 0, up to rounding,
        for a causal model.
    """
    batch, changed_batch, is_newer = _make_histories(model.n_items, model.max_seq_length)
    device = model.item_embedding.weight.device
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            states = model.encode(batch.to(device)).cpu()  # [m, d]
            torch.manual_seed(0)  # again, so that a model that samples does so alike
            changed_states = model.encode(changed_batch.to(device)).cpu()
    finally:
        model.train(was_training)

    # All states may be 0, where weights start at 0; then the divisor is the smallest number.
    largest_state = states.abs().max().clamp(min=torch.finfo(states.dtype).tiny)
    largest_change = (states - changed_states)[~is_newer].abs().max()
    return float(largest_change / largest_state)


def _make_histories(num_items: int, max_length: int) -> tuple[SequenceBatch, SequenceBatch, Tensor]:
    """Make two random histories, and the same ones with other interactions in their newer halves.

    Args:
        num_items: number of items, the padding item 0 included.
        max_length: the longest history that a model takes. The histories have 12 and 9 interactions
            if it allows as many.

    Returns:
        The histories as a batch, one after the other; the changed ones; and for each of the m
        interactions, [m], whether it is in the newer half of its history.
    """
    longest = min(12, max_length)
    lengths = torch.tensor([longest, max(longest - 3, 1)])
    num_interactions = int(lengths.sum())

    # Random items, without the padding, and others for the changed histories. Times are in seconds
    # from a day in 2017, with gaps of up to an hour.
    generator = torch.Generator().manual_seed(0)
    shape = 2, num_interactions
    items, other_items = torch.randint(1, num_items, shape, generator=generator)
    gaps = torch.rand(num_interactions, generator=generator, dtype=torch.float64)  # in hours
    times = 1.5e9 + 3600 * gaps.cumsum(0)
    batch = SequenceBatch.from_lengths(items, lengths, max_length, times=times)

    # ``row`` is the history of each interaction, and ``index`` its place in there, from 0. Of a
    # history with 9 interactions the first 4 are the older half; at least one is older in any.
    is_newer = batch.index >= (lengths // 2).clamp(min=1)[batch.row]
    changed_items = torch.where(is_newer, other_items, items)
    changed_times = torch.where(is_newer, times + 30 * 3600, times)  # 30 hours later
    return batch, replace(batch, items=changed_items, times=changed_times), is_newer


class LossWatch:
    """Sums up the losses of an epoch, and stops it at one that is not finite.

    A loss on a GPU is copied without waiting and read ``LATE`` steps later, when the copy is
    complete; a loss on the CPU is read at once.

    Args:
        epoch: number of the epoch, for the message about a loss that is not finite.
        learning_rate: the learning rate, for that message.
    """

    def __init__(self, epoch: int, learning_rate: float) -> None:
        self.epoch, self.learning_rate = epoch, learning_rate
        self.total_loss = 0.0
        self.num_targets = 0
        # of each step: loss, CUDA event after its copy, step, number of targets
        self._unread: deque[tuple[Tensor | float, Any, int, int]] = deque()

    def add(self, loss: Tensor | float, step: int, num_targets: int) -> None:
        """Add the loss of a step, before its gradient is made.

        Args:
            loss: the mean over the targets of the step: a number, or a scalar on any device.
            step: number of the step in its epoch.
            num_targets: number of targets, by which the loss counts in the mean of the epoch.

        Raises:
            TrainingError: if this loss, or on a GPU that of an earlier step, is not finite.
        """
        # Reading a loss from a GPU at once would wait for the GPU. So it is copied meanwhile, and
        # read LATE steps later; on the CPU no loss stays unread.
        num_unread = 0
        copied = None  # the CUDA event after the copy, if the loss is copied
        if isinstance(loss, Tensor) and loss.device.type != "cpu":
            num_unread = LATE
            is_cuda = loss.is_cuda
            loss = loss.to("cpu", non_blocking=True)  # into pinned memory
            # The copy goes on while this process does other things. An event that is recorded
            # behind it can be waited for, and so tells when the copy is complete.
            if is_cuda:
                copied = torch.cuda.Event()
                copied.record()
        self._unread.append((loss, copied, step, num_targets))
        self._read_all_but(num_unread)

    def compute_mean(self) -> float:
        """Return the mean loss of a target in all steps, after waiting for the last step."""
        self._read_all_but(0)
        return self.total_loss / max(self.num_targets, 1)

    def _read_all_but(self, num_unread: int) -> None:
        """Read the losses of all steps but the newest ones, and add them to the total.

        Args:
            num_unread: how many of the newest steps are left for a later call.

        Raises:
            TrainingError: if a loss is not finite; says what may help.
        """
        # ``_unread`` has the steps from the oldest on. A loss is the mean over the targets of its
        # step, so in the total, a sum over targets, it counts once for each of them.
        while len(self._unread) > num_unread:
            loss, copied, step, num_targets = self._unread.popleft()
            if copied is not None:  # the event after the copy of a loss that was on a GPU
                copied.synchronize()
            value = float(loss)
            if not math.isfinite(value):
                raise TrainingError(
                    f"loss is {value} in epoch {self.epoch}, batch {step}; lower learning_rate "
                    f"({self.learning_rate}), set clip_grad_norm: {{max_norm: 1}} or precision fp32"
                )
            self.total_loss += value * num_targets
            self.num_targets += num_targets
