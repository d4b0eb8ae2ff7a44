"""``make bench-sce``: scalable cross-entropy against full cross-entropy on 500,000 items.

Every run has a process of its own, so that peak memory is each side's own; sides take turns. Prints
the table and writes ``results/sce.md``. ``python benchmarks/sce.py SIDE`` makes one measurement.
Then training steps over a million items, by ``sce_step.py``; ``sce.py million`` makes these alone.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import torch
from page import replace_section
from rich.console import Console
from speed import Report
from torch import Tensor
from torch.nn import functional as F

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
PAGE = Path(__file__).parent.parent / "results" / "sce.md"
MILLION_ROUNDS = 3
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
console = Console()


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
        "threads": torch.get_num_threads(),
    }


def worker(side: str, file: str = __file__) -> dict[str, Any]:
    """One measurement in a fresh process."""
    console.print(f"[dim]{side}[/dim]")
    done = subprocess.run([sys.executable, file, side], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def million() -> str:
    """Training steps over a million items, with dense new gradients and with one kept."""
    runs: dict[str, list[dict[str, Any]]] = {"dense": [], "kept": []}
    file = str(Path(__file__).with_name("sce_step.py"))
    for _ in range(MILLION_ROUNDS):
        for side, found in runs.items():
            found.append(worker(side, file))
    best = {side: min(found, key=lambda run: run["all"]) for side, found in runs.items()}
    lines = ["| | new gradients | one kept |", "|---|---|---|"]
    for key, what in PARTS.items():
        form = "{:,.0f}" if key in ("faults", "peak_mb") else "{:.3f}"
        cells = (form.format(best[side][key]) for side in runs)
        lines.append(f"| {what} | {' | '.join(cells)} |")
    spread = (", ".join(f"{run['all']:.2f}" for run in found) for found in runs.values())
    lines.append(f"| every run's step | {' | '.join(spread)} |")
    dense, kept = best.values()
    same = "the same" if len({r["weights"] for f in runs.values() for r in f}) == 1 else "**other**"
    words = (
        f"PosSASRec with L = 50, {dense['targets']:,.0f} targets a step, 1,000,000 x "
        f"64 weights of items, {torch.get_num_threads()} thread(s). CPU-seconds of a step, the "
        f"best of {MILLION_ROUNDS} runs of each side, in turns. Both end with {same} weights. "
        f"A step with one kept is {dense['all'] / kept['all']:.2f} times as fast."
    )
    return "\n".join([words, "", *lines])


def main() -> None:
    """Measure, print, write."""
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in NAMES}
    for _ in range(ROUNDS):
        for side, found in runs.items():
            found.append(worker(side))
    best = {
        side: {key: min(run[key] for run in found) for key in found[0]}
        for side, found in runs.items()
    }
    sides = ["| loss | loss and gradient | whole step | peak above base | peak |"]
    sides.append("|---|---|---|---|---|")
    for side, name in NAMES.items():
        run = best[side]
        sides.append(
            f"| {name} | {run['loss_seconds']:.3f} s | {run['step_seconds']:.3f} s "
            f"| {run['above_base_mb']:,.0f} MB | {run['peak_mb']:,.0f} MB |"
        )
    report, mine = Report(), best["sce"]
    for what, key in (("above the base", "above_base_mb"), ("in all", "peak_mb")):
        ratio, peer = mine[key] / best["unchunked"][key], best["unchunked"][key]
        figures = f"{mine[key]:,.0f} MB", f"{peer:,.0f} MB"
        report.add(f"peak memory {what}, SCE / all logits", *figures, ratio, "<= 0.1", ratio <= 0.1)
    for what, key, goal in (
        ("whole step", "step_seconds", 5),
        ("loss and gradient", "loss_seconds", None),
    ):
        peer = best["chunked"][key]
        report.add(
            f"steps per second, {what}, SCE / in chunks",
            f"{1 / mine[key]:.2f}",
            f"{1 / peer:.2f}",
            peer / mine[key],
            f">= {goal}" if goal else "none",
            goal is None or peer / mine[key] >= goal,
        )
    table = "\n".join([*sides, "", *report.lines])
    console.print(table, markup=False, soft_wrap=True)
    threads = f"{mine['threads']} thread{'s' * (mine['threads'] > 1)}"
    text = f"""# Scalable cross-entropy

Written by `make bench-sce`. {platform.processor() or platform.machine()}, {threads}, float32,
torch {torch.__version__}, Python {platform.python_version()}. A generated catalogue of {ITEMS:,}
items, d={D}, {POSITIONS:,} positions a step with given hidden states and random targets; no
encoder. SCE with its defaults (`properties/loss/SCE.yaml`). CPU-seconds. *Loss and gradient*:
forward and backward, to the hidden states and the item table. *Whole step*: that and fused Adam on
the item table. *Base*: the process with its libraries, item table, both moments of Adam and hidden
states; the dense gradient of the item table counts above it. Every run has a process of its own,
sides take turns, each figure is the best of {ROUNDS} runs.

{table}

## A million items

<!-- begin million -->
<!-- end million -->
"""
    PAGE.write_text(text)
    replace_section(PAGE, "million", million())


if __name__ == "__main__":
    if sys.argv[1:] == ["million"]:  # this part alone
        replace_section(PAGE, "million", million())
    elif len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
    else:
        main()
