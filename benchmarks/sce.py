"""``make bench-sce``: scalable cross-entropy against full cross-entropy on 500,000 items.

Every run has a process of its own, so that peak memory is each side's own; sides take turns. Then
training steps over a million items, and all losses on three sizes of catalogue. Prints the tables
and writes ``results/sce.md`` and ``docs/losses.md``; ``sce.py losses``, ``million`` or ``sampled``
makes one of them.
"""

from __future__ import annotations

import itertools
import resource
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
from training import Size, make_step, make_trainer

from recbole_pos.experiment.folder import peak_rss_mb
from recbole_pos.experiment.memory import keep_freed_memory
from recbole_pos.layers.losses import full_cross_entropy
from recbole_pos.layers.row_gradients import kept_gradient
from recbole_pos.layers.sampled import SampledLoss
from recbole_pos.layers.sce import scalable_cross_entropy
from recbole_pos.yaml_files import ROOT, read_yaml

ITEMS, D, POSITIONS = 500_000, 64, 2_000
ROUNDS = 2
STEPS = {"sce": 20, "chunked": 4, "unchunked": 3}
NAMES = {
    "sce": "SCE",
    "chunked": "full cross-entropy in chunks (`loss_type: CE`)",
    "unchunked": "full cross-entropy on all logits (`F.cross_entropy`)",
}
MILLION = Size(7_000, 1_000_000, 1_000_000, length=50, d=64, layers=2, batch=128)
MILLION_ROUNDS, MILLION_STEPS = 3, 5
SAMPLED = {
    "CE": {},
    "sampled_softmax": {"negatives": 256},
    "gBCE": {"negatives": 256, "gbce_t": 0.75},
    "BCE": {"negatives": 1},
    "in_batch": {},
}
SAMPLED_ITEMS, SAMPLED_POSITIONS, SAMPLED_STEPS = (3_706, 11_000, 100_000), 6_400, 5
PARTS = {
    "zero": "zeroing",
    "forward": "encoder, choosing items, loss and its gradient",
    "backward": "backward",
    "adam": "fused Adam over all rows",
    "all": "whole step",
    "system": "of which in the system (page faults)",
    "faults": "page faults",
    "peak_mb": "peak of memory, MB",
}


def unchunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the loss as most code computes it; row 0 is one more candidate."""
    return F.cross_entropy(hidden @ weight.t(), targets)


def measure(side: str) -> dict[str, Any]:
    """Return figures of the steps of one side in this process; the first one warms up."""
    keep_freed_memory()
    torch.manual_seed(0)
    sce = partial(scalable_cross_entropy, **read_yaml(ROOT / "loss" / "SCE.yaml"))
    loss_function = {"sce": sce, "chunked": full_cross_entropy, "unchunked": unchunked}[side]
    weight = torch.nn.Parameter(0.02 * torch.randn(ITEMS + 1, D))
    hidden = torch.randn(POSITIONS, D, requires_grad=True)
    optimizer = torch.optim.Adam([weight], fused=True)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()  # makes the optimiser's state
    optimizer.zero_grad()
    base = psutil.Process().memory_info().rss / 2**20
    losses, steps = [], []
    with kept_gradient(weight) if side == "sce" else nullcontext() as kept:
        for _ in range(STEPS[side] + 1):
            targets = torch.randint(1, ITEMS + 1, (POSITIONS,))
            hidden.grad = None
            started = time.process_time()
            optimizer.zero_grad()
            if kept:
                kept.clear()
            loss_function(hidden, weight, targets).backward()
            losses.append(time.process_time() - started)
            optimizer.step()
            steps.append(time.process_time() - started)
    return {
        "loss_seconds": min(losses[1:]),
        "step_seconds": min(steps[1:]),
        "peak_mb": peak_rss_mb(),
        "above_base_mb": peak_rss_mb() - base,
    }


def time_calls(spent: dict[str, float], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that adds its CPU-seconds to ``spent[name]``."""

    def timed(*args: Any, **named: Any) -> Any:
        begun = time.process_time()
        result = call(*args, **named)
        spent[name] = spent.get(name, 0.0) + time.process_time() - begun
        return result

    return timed


def million_steps(side: str) -> dict[str, float]:
    """Return the parts of a step of PosSASRec in this process, after two that warm up.

    Both sides make the same steps, to the same bits.
    """
    keep_freed_memory()
    trainer, loader = make_trainer(MILLION, loss_type="SCE")
    if side == "dense":
        trainer.adapter.find_kept_table = lambda: None
    spent: dict[str, float] = {}
    optimizer = trainer.optimizer
    optimizer.zero_grad = time_calls(spent, "zero", optimizer.zero_grad)
    optimizer.step = time_calls(spent, "adam", optimizer.step)
    loss = time_calls(spent, "forward", trainer.adapter.choose_loss(packed=True))
    step = time_calls(spent, "all", make_step(trainer, loss))
    batches = list(itertools.islice(loader, MILLION_STEPS + 2))
    trainer.model.train()
    with trainer.steps_in_rows():
        for batch in batches[:2]:
            step(batch)
        spent.clear()
        before = resource.getrusage(resource.RUSAGE_SELF)
        for batch in batches[2:]:
            step(batch)
        after = resource.getrusage(resource.RUSAGE_SELF)
    figures = {name: seconds / MILLION_STEPS for name, seconds in spent.items()}
    figures["backward"] = 2 * figures["all"] - sum(figures.values())
    return figures | {
        "system": (after.ru_stime - before.ru_stime) / MILLION_STEPS,
        "faults": (after.ru_minflt - before.ru_minflt) / MILLION_STEPS,
        "targets": sum(map(len, batches[2:])) / MILLION_STEPS,
        "peak_mb": peak_rss_mb(),
        "weights": sum(p.double().sum().item() for p in trainer.model.parameters()),
    }


def losses() -> str:
    """Return the table of all losses, and of the goals of SCE."""
    runs = in_turns(NAMES, ROUNDS, lambda side: run_alone(measure, side))
    best = {side: least(of_side) for side, of_side in runs.items()}
    ours, chunked, unchunked = (best[side] for side in NAMES)
    forms = {"loss_seconds": "{:.3f} s", "step_seconds": "{:.3f} s"}
    forms |= {"above_base_mb": "{:,.0f} MB", "peak_mb": "{:,.0f} MB"}
    sides = table(
        ("loss", "loss and gradient", "whole step", "peak above base", "peak"),
        ([NAMES[s], *(form.format(best[s][key]) for key, form in forms.items())] for s in NAMES),
    )
    report = Report()
    for what, key in (("above the base", "above_base_mb"), ("in all", "peak_mb")):
        what = f"peak memory {what}, SCE / all logits"
        report.add(what, ours[key], unchunked[key], forms[key], at_most=0.1)
    goals = ("whole step", "step_seconds", 5), ("loss and gradient", "loss_seconds", None)
    for what, key, goal in goals:
        what = f"steps per second, {what}, SCE / in chunks"
        report.add(what, 1 / ours[key], 1 / chunked[key], "{:.2f}", at_least=goal)
    return f"{machine()}, best of {ROUNDS}.\n\n{sides}\n\n{report}"


def million() -> str:
    """Return the table of training steps over a million items, with new gradients or one kept."""
    runs = in_turns(("dense", "kept"), MILLION_ROUNDS, lambda side: run_alone(million_steps, side))
    best = [min(of_side, key=lambda run: run["all"]) for of_side in runs.values()]
    rows = []
    for key, what in PARTS.items():
        form = "{:,.0f}" if key in ("faults", "peak_mb") else "{:.3f}"
        rows.append([what, *(form.format(run[key]) for run in best)])
    steps = (", ".join(f"{run['all']:.2f}" for run in of_side) for of_side in runs.values())
    rows.append(["every run's step", *steps])
    dense, kept = best
    weights = {run["weights"] for of_side in runs.values() for run in of_side}
    same = "the same" if len(weights) == 1 else "**other**"
    words = (
        f"PosSASRec with L = 50, {dense['targets']:,.0f} targets a step, 1,000,000 x "
        f"64 weights of items, {torch.get_num_threads()} thread(s). CPU-seconds of a step, the "
        f"best of {MILLION_ROUNDS} runs of each side, in turns. Both end with {same} weights. "
        f"A step with one kept is {dense['all'] / kept['all']:.2f} times as fast."
    )
    return f"{words}\n\n{table(('', 'new gradients', 'one kept'), rows)}"


def time_loss(loss_type: str, items: int) -> float:
    """Return the fewest CPU-seconds of a loss and its gradients, in this process, once warm."""
    keep_freed_memory()
    torch.manual_seed(0)
    weight = torch.nn.Parameter(0.02 * torch.randn(items + 1, D))
    hidden = torch.randn(SAMPLED_POSITIONS, D, requires_grad=True)
    loss_function = full_cross_entropy
    if loss_type != "CE":
        loss_function = SampledLoss(loss_type, torch.ones(items + 1), **SAMPLED[loss_type])
    seconds = []
    for _ in range(SAMPLED_STEPS + 1):
        targets = torch.randint(1, items + 1, (SAMPLED_POSITIONS,))
        weight.grad = hidden.grad = None
        started = time.process_time()
        loss_function(hidden, weight, targets).backward()
        seconds.append(time.process_time() - started)
    return min(seconds[1:])


def sampled() -> str:
    """Return the table of the milliseconds of each loss, by the number of items."""
    heads = [
        f"`{name}`, {options['negatives']}" if options else f"`{name}`"
        for name, options in SAMPLED.items()
    ]
    rows = []
    for items in SAMPLED_ITEMS:
        milliseconds = (1000 * run_alone(time_loss, name, items) for name in SAMPLED)
        rows.append([f"{items:,}", *(f"{value:,.0f}" for value in milliseconds)])
    return f"{machine()}.\n\n{table(('items', *heads), rows)}"


if __name__ == "__main__":
    sections = {"losses": losses, "million": million, "sampled": sampled}
    for name in sys.argv[1:] or sections:
        page = DOCS / "losses.md" if name == "sampled" else RESULTS / "sce.md"
        replace_section(page, name, sections[name]())
