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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from data import GENERATED, write_log
from page import RESULTS, table
from torch import nn
from training import (
    build,
    epoch_flops,
    mean_seconds,
    peak_flops,
    peak_memory,
    reset_peak,
    synchronise,
    time_steps,
)

from recbole_pos.layers.losses import full_cross_entropy

PRECISIONS = ("fp32", "tf32", "bf16")
TINY_OPTIONS = {
    **{"hidden_size": 8, "inner_size": 8, "n_layers": 1},
    **{"MAX_ITEM_LIST_LENGTH": 10, "epochs": 1},
}
Rows = Iterator[list[str]]  # of a table, its head first


@dataclass(frozen=True)
class Size:
    """Sizes of a dataset and of the model that learns from it.

    Attributes:
        items, events, each: items and interactions that are generated, ``each`` a user on average.
        whole: how many times as many interactions the whole dataset has.
    """

    items: int
    events: int
    each: int
    whole: int
    length: int
    d: int
    layers: int
    batch: int


ML_20M = Size(27_000, 5_000_000, 145, whole=4, length=200, d=256, layers=4, batch=256)
ML_1M = Size(3_700, 1_000_000, 165, whole=1, length=200, d=64, layers=2, batch=128)
TINY = Size(40, 900, 15, whole=1, length=20, d=16, layers=1, batch=8)


def measure_epoch(size: Size, folder: str, seconds: float, **options: Any) -> list[str]:
    """Return the figures of an epoch; after ``seconds`` the rest is extrapolated."""
    experiment = build(
        "PosSASRec",
        GENERATED,
        data_path=folder,
        MAX_ITEM_LIST_LENGTH=size.length,
        hidden_size=size.d,
        inner_size=4 * size.d,
        n_layers=size.layers,
        n_heads=max(size.d // 64, 1),
        attn_dropout_prob=0.0,
        train_batch_size=size.batch,
        **options,
    )
    trainer = experiment.trainer
    loader = trainer.training_loader(experiment.loaders["train"])
    reset_peak(trainer.device)
    timed = time_steps(trainer, loader, seconds)
    part = timed.targets / loader.num_targets / size.whole
    epoch_seconds = timed.seconds / part
    flops = size.whole * epoch_flops(loader, size.d, size.layers, size.items) / epoch_seconds
    dtype = torch.bfloat16 if trainer.precision.name == "bf16" else torch.float32
    with trainer.precision.rounded_products():
        peak = peak_flops(trainer.device, dtype, 8192 if trainer.device.type == "cuda" else 256)
    return [
        f"{epoch_seconds:.2f}",
        f"{part:.0%}",
        f"{timed.warm_seconds:.1f}",
        f"{timed.targets / timed.seconds:,.0f}",
        f"{flops / 1e12:.1f}",
        f"{flops / peak:.0%} of {peak / 1e12:.0f}",
        f"{peak_memory(trainer.device):.1f}",
    ]


def epochs(sizes: tuple[Size, ...], budget: float, option: str, values: Any) -> Rows:
    """Yield a row for each size and value of an option, with a part of the time for each."""
    yield [
        *("d, layers", option, "s an epoch", "measured", "first steps, s", "targets/s"),
        *("TFLOP/s", "of a product", "GB"),
    ]
    seconds = budget / (2 * len(sizes) * len(values))
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            write_log(Path(folder), size.events, size.each, size.items)
            for value in values:
                figures = measure_epoch(size, folder, seconds, **{option: value})
                yield [f"{size.d}, {size.layers}", str(value), *figures]


def million(items: int, positions: int, d: int) -> Rows:
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


def precisions(seeds: int, options: dict[str, Any]) -> Rows:
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


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        title, about: its heading and introduction.
        seconds: its limit.
        measure: yields the rows of its table, given whether sizes are tiny and a budget in seconds.
    """

    title: str
    seconds: int
    about: str
    measure: Callable[[bool, float], Rows]


# a CPU takes a minute to compile
COMPILED = (False, True) if torch.cuda.is_available() else (False,)
SECTIONS = {
    "ml-20m": Section(
        "ml-20m sizes",
        110,
        "138,000 users, 27,000 items, 20 million interactions, d = 256, 4 layers, L = 200, all "
        "items in the loss. Goal: 10 s an epoch on one H200.",
        lambda tiny, s: epochs((TINY if tiny else ML_20M,), s, "precision", PRECISIONS[::-1]),
    ),
    "ml-1m": Section(
        "ml-1m sizes",
        40,
        "6,040 users, 3,700 items, a million interactions, d = 64, 2 layers, L = 200. Goal: 1 s an "
        "epoch on one H200.",
        lambda tiny, s: epochs((TINY if tiny else ML_1M,), s, "precision", PRECISIONS[::-1]),
    ),
    "compile": Section(
        "compile: True",
        140,
        "Seconds of an epoch beside those without; the first steps, which compile, stand apart.",
        lambda tiny, s: epochs((TINY,) if tiny else (ML_20M, ML_1M), s, "compile", COMPILED),
    ),
    "million": Section(
        "A million items",
        30,
        "Exact cross-entropy of 4,096 positions, d = 128. Goal: 8 GB beside weights, gradients and "
        "optimiser.",
        lambda tiny, s: million(*((500, 64, 8) if tiny else (1_000_000, 4_096, 128))),
    ),
    "precision": Section(
        "Precision",
        80,
        "PosSASRec on ml-100k, ten epochs: test NDCG@10, seconds of training without validation, "
        "and after how many of them validation first has 99% of the best NDCG@10 of fp32.",
        lambda tiny, s: precisions(1, TINY_OPTIONS) if tiny else precisions(3, {"epochs": 10}),
    ),
}


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


def make_page(results: dict[str, tuple[list[list[str]], str]]) -> str:
    """Return the page of everything that was measured."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    parts = [
        "# Speed on a GPU",
        f"{gpu}; Python {platform.python_version()}, torch {torch.__version__}. By `make "
        "bench-gpu`; data are generated, but for ml-100k. Epochs are whole or, where the time is "
        "up, a part in proportion (*measured*); a product is one of 8,192 rows and columns in the "
        "same precision.",
    ]
    for name, (rows, problem) in results.items():
        text = table(rows[0], rows[1:]) if rows else ""
        parts += [f"## {SECTIONS[name].title}", SECTIONS[name].about, text, problem]
    return "\n\n".join(part for part in parts if part) + "\n"


def main() -> None:
    """Write all sections to the page, or print one of them as lines of json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small sizes, which are only printed")
    parser.add_argument("--section", choices=SECTIONS, help="one of them, as json")
    given = parser.parse_args()
    if given.section:
        section = SECTIONS[given.section]
        for row in section.measure(given.tiny, 1.0 if given.tiny else 0.8 * section.seconds):
            print(json.dumps(row), flush=True)
        return
    if not (given.tiny or torch.cuda.is_available()):
        sys.exit("no GPU; --tiny runs it in small sizes, to see that it does")
    results: dict[str, tuple[list[list[str]], str]] = {}
    for name in SECTIONS:
        results[name] = run_section(name, given.tiny)
        if not given.tiny:
            text = make_page(results)  # so far
            (RESULTS / "gpu.md").write_text(text, encoding="utf-8")
    print(make_page(results))


if __name__ == "__main__":
    main()
