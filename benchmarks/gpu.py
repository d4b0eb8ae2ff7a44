"""``make bench-gpu``: the cost of training on this GPU, in nine minutes; writes ``results/gpu.md``.

Every section is a process of its own with a limit in seconds, so that memory is its own and one
that fails or hangs leaves the others. Data are generated, but for ml-100k. On a machine without a
GPU ``--tiny`` runs all of it in small sizes: the numbers then mean nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gpu_attention import attention
from page import RESULTS, table
from torch import nn
from training import (
    Size,
    build,
    epoch_flops,
    make_trainer,
    mean_seconds,
    peak_flops,
    peak_memory,
    reset_peak,
    synchronise,
    time_steps,
)

from recbole_pos.layers.losses import full_cross_entropy

ML_20M = Size(138_000, 27_000, 20_000_000, length=200, d=256, layers=4, batch=256)
ML_1M = Size(6_040, 3_700, 1_000_000, length=200, d=64, layers=2, batch=128)
TINY = Size(60, 40, 900, length=20, d=16, layers=1, batch=8)
PRECISIONS = ("fp32", "tf32", "bf16")
TINY_OPTIONS = {"hidden_size": 8, "inner_size": 8, "n_layers": 1, "MAX_ITEM_LIST_LENGTH": 10}


@dataclass(frozen=True)
class Section:
    """A part of the page: its title, its limit in seconds, and its introduction."""

    title: str
    seconds: int
    about: str


SECTIONS = {
    "ml-20m": Section(
        "ml-20m sizes",
        110,
        "138,000 users, 27,000 items, 20 million interactions, d = 256, 4 layers, L = 200, all "
        "items in the loss. Goal: 10 s an epoch on one H200.",
    ),
    "ml-1m": Section(
        "ml-1m sizes",
        40,
        "6,040 users, 3,700 items, a million interactions, d = 64, 2 layers, L = 200. Goal: 1 s an "
        "epoch on one H200.",
    ),
    "compile": Section(
        "compile: True",
        140,
        "Seconds of an epoch beside those without; the first steps, which compile, stand apart.",
    ),
    "attention": Section(
        "Attention kernels",
        40,
        "Forward and backward in bfloat16, batches of packed sequences; how far off float32, as a "
        "part of the largest number. A kernel that agrees and is faster than the layers' own is "
        "worth taking.",
    ),
    "million": Section(
        "A million items",
        30,
        "Exact cross-entropy of 4,096 positions, d = 128. Goal: 8 GB beside weights, gradients and "
        "optimiser.",
    ),
    "precision": Section(
        "Precision",
        80,
        "PosSASRec on ml-100k, ten epochs: test NDCG@10, seconds of training without validation, "
        "and after how many of them validation first has 99% of the best NDCG@10 of fp32.",
    ),
}


def measure_epoch(size: Size, seconds: float, **options: Any) -> dict[str, Any]:
    """Return seconds and FLOPs of an epoch; after ``seconds`` the rest is extrapolated."""
    trainer, loader = make_trainer(size, **options)
    reset_peak(trainer.device)
    timed = time_steps(trainer, loader, seconds)
    epoch_seconds = loader.num_targets / timed.targets * timed.seconds
    dtype = torch.bfloat16 if trainer.precision.name == "bf16" else torch.float32
    with trainer.precision.rounded_products():
        peak = peak_flops(trainer.device, dtype, 8192 if trainer.device.type == "cuda" else 256)
    return {
        "precision": trainer.precision.name,
        "seconds": epoch_seconds,
        "warm_seconds": timed.warm_seconds,
        "part": timed.targets / loader.num_targets,
        "targets_per_second": loader.num_targets / epoch_seconds,
        "tflops": epoch_flops(loader, size.d, size.layers, size.items) / epoch_seconds / 1e12,
        "peak_tflops": peak / 1e12,
        "memory_gb": peak_memory(trainer.device),
    }


def epochs(size: Size, budget: float) -> Iterator[list[str]]:
    """Yield a row for each precision."""
    yield ["precision", "s an epoch", "measured", "targets/s", "TFLOP/s", "of a product", "GB"]
    for precision in PRECISIONS[::-1]:
        epoch = measure_epoch(size, budget / 5, precision=precision)
        share = epoch["tflops"] / epoch["peak_tflops"]
        yield [
            epoch["precision"],
            f"{epoch['seconds']:.2f}",
            f"{epoch['part']:.0%}",
            f"{epoch['targets_per_second']:,.0f}",
            f"{epoch['tflops']:.1f}",
            f"{share:.0%} of {epoch['peak_tflops']:.0f}",
            f"{epoch['memory_gb']:.1f}",
        ]


def compiled(sizes: tuple[Size, ...], budget: float) -> Iterator[list[str]]:
    """Yield rows without and with ``compile``; a CPU, which takes a minute for it, without only."""
    yield ["d, layers", "compile", "s an epoch", "first steps, s", "GB"]
    for size in sizes:
        for is_compiled in (False, True) if torch.cuda.is_available() else (False,):
            epoch = measure_epoch(size, budget / 8, compile=is_compiled)
            yield [
                f"{size.d}, {size.layers}",
                str(is_compiled),
                f"{epoch['seconds']:.2f}",
                f"{epoch['warm_seconds']:.1f}",
                f"{epoch['memory_gb']:.1f}",
            ]


def million(items: int, positions: int, d: int) -> Iterator[list[str]]:
    """Yield memory of the loss over all items beside what stays, and its time."""
    yield ["precision", "GB beside weights", "GB of all logits", "ms a step"]
    for dtype in ("float32", "bfloat16"):
        beside_gb, seconds = measure_loss(items, positions, d, dtype == "bfloat16")
        logits_gb = positions * items * 4 / 2**30
        yield [dtype, f"{beside_gb:.2f}", f"{logits_gb:.2f}", f"{1e3 * seconds:.1f}"]


def measure_loss(items: int, positions: int, d: int, is_rounded: bool) -> tuple[float, float]:
    """Return GB beside weights, gradients and optimiser, and seconds of a step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weight = nn.Parameter(0.02 * torch.randn(items + 1, d, device=device))
    optimizer = torch.optim.Adam([weight], fused=True)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    hidden = torch.randn(positions, d, device=device, requires_grad=True)
    targets = torch.randint(1, items + 1, (positions,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=is_rounded):
            loss = full_cross_entropy(hidden, weight, targets)
        loss.backward()
        optimizer.step()

    synchronise(device)
    before = reset_peak(device)
    step()  # warms up
    seconds = mean_seconds(step, 3, device)
    return peak_memory(device) - before - weight.numel() * 4 / 2**30, seconds


def precisions(seeds: int, options: dict[str, Any]) -> Iterator[list[str]]:
    """Yield quality and time on ml-100k of each seed and precision."""
    yield ["seed", "precision", "NDCG@10", "s of training", "s to 99% of fp32"]
    for seed in range(seeds):
        level = 0.0  # of fp32, which is the first
        for name in PRECISIONS:
            experiment = build("PosSASRec", "ml-100k", precision=name, seed=seed, **options)
            trainer, loaders = experiment.trainer, experiment.loaders
            trainer.fit(loaders["train"], loaders["valid"], False, saved=False)
            score, progress = trainer.evaluate(loaders["test"])["ndcg@10"], trainer.progress
            level = level or 0.99 * (progress.best_score or 0.0)
            figures = [f"{score:.4f}", f"{progress.training_seconds:.1f}"]
            yield [str(seed), name, *figures, _seconds_to(progress.history, level)]


def _seconds_to(history: list[dict[str, Any]], level: float) -> str:
    """Return the seconds of training until validation first has that NDCG@10."""
    seconds = 0.0
    for line in history:
        seconds += line["seconds"]
        if (line["valid"] or {}).get("ndcg@10", 0.0) >= level:
            return f"{seconds:.1f}"
    return "not reached"


def measure(name: str, tiny: bool) -> Iterator[list[str]]:
    """Yield the rows of a section's table, its head first, measured in this process."""
    budget = 1.0 if tiny else 0.8 * SECTIONS[name].seconds
    large, small = (TINY, replace(TINY, d=8)) if tiny else (ML_20M, ML_1M)
    if name in ("ml-20m", "ml-1m"):
        return epochs(large if name == "ml-20m" else small, budget)
    if name == "compile":
        return compiled((large, small), budget)
    if name == "million":
        return million(*((500, 64, 8) if tiny else (1_000_000, 4_096, 128)))
    if name == "attention":
        return attention([(large, 8), (small, 8)] if tiny else [(large, 256), (small, 128)])
    options = {**TINY_OPTIONS, "epochs": 1} if tiny else {"epochs": 10}
    return precisions(1 if tiny else 3, options)


def run_section(name: str, tiny: bool) -> tuple[list[list[str]], str]:
    """Return the rows of a section, measured in a process of its own, and what went wrong."""
    command = [sys.executable, __file__, "--section", name, *["--tiny"] * tiny]
    limit, problem = SECTIONS[name].seconds, ""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        try:
            if subprocess.run(command, stdout=out, stderr=errors, timeout=limit).returncode:
                errors.seek(0)
                problem = f"Failed: {(errors.read().strip().splitlines() or ['?'])[-1]}"
        except subprocess.TimeoutExpired:
            problem = f"The rest was not done within {limit} s."
        out.seek(0)
        rows = [json.loads(line) for line in out if line.startswith("[")]
    return rows, problem


def make_page(results: dict[str, tuple[list[list[str]], str]], tiny: bool) -> str:
    """Return the page of everything that was measured."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    parts = [
        "# Speed on a GPU",
        f"{gpu}; Python {platform.python_version()}, torch {torch.__version__}. By `make "
        "bench-gpu`; data are generated, but for ml-100k. Epochs are whole or, where the time is "
        "up, a part in proportion (*measured*); a product is one of 8,192 rows and columns in the "
        "same precision.",
    ]
    if tiny:
        parts.append("**Tiny sizes, to see that it runs: the numbers mean nothing.**")
    for name, (rows, problem) in results.items():
        text = table(rows[0], rows[1:]) if rows else ""
        parts += [f"## {SECTIONS[name].title}", SECTIONS[name].about, text, problem]
    return "\n\n".join(part for part in parts if part) + "\n"


def main() -> None:
    """Write all sections to the page, or print one of them as lines of json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small sizes, on any machine")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.md")
    parser.add_argument("--section", choices=SECTIONS, help="one of them, as json")
    given = parser.parse_args()
    if given.section:
        for row in measure(given.section, given.tiny):
            print(json.dumps(row), flush=True)
        return
    if not (given.tiny or torch.cuda.is_available()):
        sys.exit("no GPU; --tiny runs it in small sizes, to see that it does")
    results: dict[str, tuple[list[list[str]], str]] = {}
    for name in SECTIONS:
        results[name] = run_section(name, given.tiny)
        given.out.write_text(make_page(results, given.tiny), encoding="utf-8")  # so far
    print(make_page(results, given.tiny))


if __name__ == "__main__":
    main()
