"""``make bench-sce``: scalable cross-entropy against full cross-entropy on 500,000 items.

Every run has a process of its own, so that peak memory is each side's own; sides take turns. Then
all losses on three sizes of catalogue. Prints the tables and writes ``results/sce.md`` and
``docs/losses.md``; ``sce.py losses`` or ``sampled`` makes one of them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import psutil
import torch
from page import DOCS, RESULTS, Report, in_turns, least, machine, replace_section, run_alone, table
from torch import Tensor
from torch.nn import functional as F

from recbole_pos.experiment.folder import peak_rss_mb
from recbole_pos.layers.item_table import kept_gradient
from recbole_pos.layers.losses import full_cross_entropy
from recbole_pos.layers.sampled import SampledLoss
from recbole_pos.layers.scalable import scalable_cross_entropy
from recbole_pos.tables.storage import keep_freed_memory
from recbole_pos.yaml_files import ROOT, read_yaml

ITEMS, D, POSITIONS, ROUNDS = 500_000, 64, 2_000, 2
ALL_LOGITS = "all logits"
# Steps that are timed, of each loss.
STEPS = {"SCE": 20, "CE": 4, ALL_LOGITS: 3}
NAMES = {
    "SCE": "SCE",
    "CE": "full cross-entropy in chunks (`loss_type: CE`)",
    ALL_LOGITS: "full cross-entropy on all logits (`F.cross_entropy`)",
}
# Figure of :func:`measure` -> what tables call it, and how they write it.
FORMS = {
    "loss_seconds": ("loss and gradient", "{:.3f} s"),
    "step_seconds": ("whole step", "{:.3f} s"),
    "above_base_mb": ("peak above base", "{:,.0f} MB"),
    "peak_mb": ("peak", "{:,.0f} MB"),
}
# Losses that sample negatives, with full cross-entropy to compare -> their options.
SAMPLED: dict[str, dict[str, Any]] = {
    "CE": {},
    "sampled_softmax": {"negatives": 256},
    "gBCE": {"negatives": 256, "gbce_t": 0.75},
    "BCE": {"negatives": 1},
    "in_batch": {},
}
SAMPLED_ITEMS, SAMPLED_POSITIONS, SAMPLED_STEPS = (3_706, 11_000, 100_000), 6_400, 5


def make_loss(name: str, items: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a loss as a function of states [n, d], item vectors [items + 1, d] and targets [n].

    Args:
        name: ``SCE``, ``CE``, a sampled loss, or ``all logits``, which computes all scores at once,
            as most code does.
        items: number of items; row 0 of the vectors is padding.
    """
    if name == "SCE":
        return partial(scalable_cross_entropy, **read_yaml(ROOT / "loss" / "SCE.yaml"))
    if name == "CE":
        return full_cross_entropy
    if name == ALL_LOGITS:  # padding counts as one more item, which hardly matters
        return lambda hidden, weight, targets: F.cross_entropy(hidden @ weight.t(), targets)
    return SampledLoss(name, torch.ones(items + 1), **SAMPLED[name])


def measure(name: str, items: int, positions: int, steps: int) -> dict[str, Any]:
    """Return time and memory of a training step that consists of a loss, measured in this process.

    A first step warms up, and is not counted.

    Args:
        name: the loss, see :func:`make_loss`.
        items: number of items.
        positions: number of states in a step.
        steps: number of steps.

    Returns:
        The least CPU-seconds of the loss with its gradient, and of the whole step; peak of memory
        in MB, and how much of it is above what the process had before the first step.
    """
    keep_freed_memory()
    torch.manual_seed(0)
    loss = make_loss(name, items)
    weight = torch.nn.Parameter(0.02 * torch.randn(items + 1, D))
    hidden = torch.randn(positions, D, requires_grad=True)
    optimizer = torch.optim.Adam([weight], fused=True)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()  # makes the optimiser's state
    optimizer.zero_grad()

    base = psutil.Process().memory_info().rss / 2**20
    loss_seconds, step_seconds = [], []
    # SCE changes the gradient of few items, and keeps one buffer for it over all steps.
    with kept_gradient(weight) if name == "SCE" else nullcontext() as kept:
        for _ in range(steps + 1):
            targets = torch.randint(1, items + 1, (positions,))
            hidden.grad = None
            started = time.process_time()
            optimizer.zero_grad()
            if kept:
                kept.clear()
            loss(hidden, weight, targets).backward()
            loss_seconds.append(time.process_time() - started)
            optimizer.step()
            step_seconds.append(time.process_time() - started)
    return {
        "loss_seconds": min(loss_seconds[1:]),
        "step_seconds": min(step_seconds[1:]),
        "above_base_mb": peak_rss_mb() - base,
        "peak_mb": peak_rss_mb(),
    }


def losses() -> str:
    """Return the tables of full and scalable cross-entropy, and of the goals of the latter."""

    def run(side: str) -> dict[str, Any]:
        return run_alone(measure, side, ITEMS, POSITIONS, STEPS[side])

    best = {side: least(runs) for side, runs in in_turns(NAMES, ROUNDS, run).items()}
    rows = (
        [NAMES[side], *(form.format(best[side][key]) for key, (_, form) in FORMS.items())]
        for side in NAMES
    )
    sides = table(("loss", *(head for head, _ in FORMS.values())), rows)

    # Compare memory with the loss on all logits, and speed with the one in chunks.
    ours, chunked, unchunked = (best[side] for side in NAMES)
    report = Report()
    for what, key in (("above the base", "above_base_mb"), ("in all", "peak_mb")):
        what = f"peak memory {what}, SCE / all logits"
        report.add(what, ours[key], unchunked[key], "{:,.0f} MB", at_most=0.1)
    for key, goal in (("step_seconds", 5), ("loss_seconds", None)):
        what = f"steps per second, {FORMS[key][0]}, SCE / in chunks"
        report.add(what, 1 / ours[key], 1 / chunked[key], "{:.2f}", at_least=goal)
    return f"{machine()}, best of {ROUNDS}.\n\n{sides}\n\n{report}"


def sampled() -> str:
    """Return a table of milliseconds by number of items, with a column for each sampled loss."""
    heads = [
        f"`{name}`, {options['negatives']}" if options else f"`{name}`"
        for name, options in SAMPLED.items()
    ]
    rows = []
    for items in SAMPLED_ITEMS:
        size = items, SAMPLED_POSITIONS, SAMPLED_STEPS
        seconds = [run_alone(measure, name, *size)["loss_seconds"] for name in SAMPLED]
        rows.append([f"{items:,}", *(f"{1000 * value:,.0f}" for value in seconds)])
    return f"{machine()}.\n\n{table(('items', *heads), rows)}"


if __name__ == "__main__":
    sections = {"losses": (losses, RESULTS / "sce.md"), "sampled": (sampled, DOCS / "losses.md")}
    for name in sys.argv[1:] or sections:
        make_section, page = sections[name]
        replace_section(page, name, make_section())
