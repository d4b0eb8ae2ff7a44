"""``make bench-sce``: scalable cross-entropy against full cross-entropy on 500,000 items.

Every run has a process of its own, so that peak memory is each side's own; sides take turns. Prints
the table and writes ``results/sce.md``. ``python benchmarks/sce.py SIDE`` makes one measurement.
Then training steps over a million items; ``sce.py million`` makes these alone.
"""

from __future__ import annotations

import itertools
import json
import resource
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import psutil
import torch
from page import RESULTS, Report, in_a_process, in_turns, least, machine, replace_section, table
from torch import Tensor
from torch.nn import functional as F
from training import Size, step_of, trainer_of

from recbole_pos.experiment.folder import peak_rss_mb
from recbole_pos.experiment.memory import keep_freed_memory
from recbole_pos.layers.losses import full_cross_entropy
from recbole_pos.layers.row_gradients import kept_gradient
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
    """What most code does; row 0 is one candidate more."""
    return F.cross_entropy(hidden @ weight.t(), targets)


def sce(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """With the defaults, which are the sizes the paper recommends."""
    options = read_yaml(ROOT / "loss" / "SCE.yaml")
    return scalable_cross_entropy(hidden, weight, targets, **options)


def measure(side: str) -> dict[str, Any]:
    """Steps of one side in this process; the first one warms up."""
    keep_freed_memory()
    torch.manual_seed(0)
    loss_function = {"sce": sce, "chunked": full_cross_entropy, "unchunked": unchunked}[side]
    weight = torch.nn.Parameter(0.02 * torch.randn(ITEMS + 1, D))
    hidden = torch.randn(POSITIONS, D, requires_grad=True)
    optimizer = torch.optim.Adam([weight], fused=True)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()  # makes the optimiser's state
    optimizer.zero_grad()
    base = psutil.Process().memory_info().rss / 2**20
    losses, steps = [], []
    with ExitStack() as stack:
        kept = stack.enter_context(kept_gradient(weight)) if side == "sce" else None
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


class Parts:
    """CPU-seconds of calls, by name."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same, and its time is added up."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            begun = time.process_time()
            found = call(*args, **kwargs)
            self.spent[name] = self.spent.get(name, 0.0) + time.process_time() - begun
            return found

        return wrapped


def million_steps(side: str) -> dict[str, float]:
    """A step of PosSASRec in this process, part by part, after two that warm up.

    Both sides make the same steps, to the same bits.
    """
    keep_freed_memory()
    trainer, loader = trainer_of(MILLION, loss_type="SCE")
    if side == "dense":
        trainer.adapter.table = lambda: None
    parts, optimizer = Parts(), trainer.optimizer
    optimizer.zero_grad = parts.timed("zero", optimizer.zero_grad)
    optimizer.step = parts.timed("adam", optimizer.step)
    loss = parts.timed("forward", trainer.adapter.loss(packed=True))
    step = parts.timed("all", step_of(trainer, loss))
    batches = list(itertools.islice(loader, MILLION_STEPS + 2))
    trainer.model.train()
    with trainer.steps_in_rows():
        for batch in batches[:2]:
            step(batch)
        parts.spent.clear()
        before = resource.getrusage(resource.RUSAGE_SELF)
        for batch in batches[2:]:
            step(batch)
        after = resource.getrusage(resource.RUSAGE_SELF)
    found = {name: spent / MILLION_STEPS for name, spent in parts.spent.items()}
    found["backward"] = 2 * found["all"] - sum(found.values())
    return found | {
        "system": (after.ru_stime - before.ru_stime) / MILLION_STEPS,
        "faults": (after.ru_minflt - before.ru_minflt) / MILLION_STEPS,
        "targets": sum(map(len, batches[2:])) / MILLION_STEPS,
        "peak_mb": peak_rss_mb(),
        "weights": sum(p.double().sum().item() for p in trainer.model.parameters()),
    }


def losses() -> str:
    """Every loss; goals are of SCE."""
    runs = in_turns(NAMES, ROUNDS, lambda side: in_a_process("sce.py", side))
    best = {side: least(found) for side, found in runs.items()}
    mine, chunked, unchunked = (best[side] for side in NAMES)
    forms = {"loss_seconds": "{:.3f} s", "step_seconds": "{:.3f} s"}
    forms |= {"above_base_mb": "{:,.0f} MB", "peak_mb": "{:,.0f} MB"}
    sides = table(
        ("loss", "loss and gradient", "whole step", "peak above base", "peak"),
        ([NAMES[s], *(form.format(best[s][key]) for key, form in forms.items())] for s in NAMES),
    )
    report = Report()
    for what, key in (("above the base", "above_base_mb"), ("in all", "peak_mb")):
        what = f"peak memory {what}, SCE / all logits"
        report.add(what, mine[key], unchunked[key], forms[key], at_most=0.1)
    for what, key, goal in (
        ("whole step", "step_seconds", 5),
        ("loss and gradient", "loss_seconds", None),
    ):
        what = f"steps per second, {what}, SCE / in chunks"
        report.add(what, 1 / mine[key], 1 / chunked[key], "{:.2f}", at_least=goal)
    return f"{machine()}, best of {ROUNDS}.\n\n{sides}\n\n{report}"


def million() -> str:
    """Training steps over a million items, with dense new gradients and with one kept."""
    sides = ("dense", "kept")
    runs = in_turns(sides, MILLION_ROUNDS, lambda side: in_a_process("sce.py", side))
    best = [min(found, key=lambda run: run["all"]) for found in runs.values()]
    rows = []
    for key, what in PARTS.items():
        form = "{:,.0f}" if key in ("faults", "peak_mb") else "{:.3f}"
        rows.append([what, *(form.format(run[key]) for run in best)])
    spread = (", ".join(f"{run['all']:.2f}" for run in found) for found in runs.values())
    rows.append(["every run's step", *spread])
    dense, kept = best
    same = "the same" if len({r["weights"] for f in runs.values() for r in f}) == 1 else "**other**"
    words = (
        f"PosSASRec with L = 50, {dense['targets']:,.0f} targets a step, 1,000,000 x "
        f"64 weights of items, {torch.get_num_threads()} thread(s). CPU-seconds of a step, the "
        f"best of {MILLION_ROUNDS} runs of each side, in turns. Both end with {same} weights. "
        f"A step with one kept is {dense['all'] / kept['all']:.2f} times as fast."
    )
    return f"{words}\n\n{table(('', 'new gradients', 'one kept'), rows)}"


if __name__ == "__main__":
    names, sys.argv = sys.argv[1:], sys.argv[:1]  # which RecBole's Config reads
    pages = {"losses": losses, "million": million}
    if names and names[0] not in pages:
        print(json.dumps(measure(names[0]) if names[0] in NAMES else million_steps(names[0])))
    else:
        for name in names or pages:  # or one alone
            replace_section(RESULTS / "sce.md", name, pages[name]())
