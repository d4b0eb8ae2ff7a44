"""``make bench-gpu``: the cost of training on this GPU, in nine minutes; writes ``results/gpu.md``.

Every section is a process of its own, so that memory is its own and one that fails leaves the
others. Data are generated. Quality by precision is a study of its own, ``studies/precision.yaml``.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from data import GENERATED, write_log
from page import RESULTS, machine, replace_section, run_alone, table
from torch import nn
from training import build, epoch_flops, mean_seconds, peak_flops, time_steps

from recbole_pos.layers.losses import full_cross_entropy

SECONDS = 15.0  # of an epoch that is longer: the rest is extrapolated
PRECISIONS = ("bf16", "tf32", "fp32")  # values of the option ``precision``
PRODUCT = 8192  # rows and columns of the matrices whose product is the fastest
GB = 2**30
ITEMS, POSITIONS, HIDDEN = 1_000_000, 4_096, 128  # of the loss over a million items


@dataclass(frozen=True)
class Size:
    """Sizes of a dataset and of the model that learns from it.

    Attributes:
        items: number of items that are generated.
        events: number of interactions that are generated.
        each: mean number of interactions of a user.
        whole: how many times as many interactions the whole dataset has.
        length: longest window of a history.
        d: hidden size.
        layers: number of layers.
        batch: windows in a batch.
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


def measure_epoch(size: Size, folder: str, **options: Any) -> list[str]:
    """Return the figures of an epoch as cells of a table; its first SECONDS are measured.

    Args:
        size: sizes of data and model.
        folder: folder that holds the generated dataset.
        options: further options of the run, such as ``precision``.

    Returns:
        Seconds of an epoch; share of it that was measured; seconds of the first steps; targets
        (items that are predicted) a second; TFLOP/s; share of the fastest product of matrices; peak
        GB.
    """
    options |= {"data_path": folder, "MAX_ITEM_LIST_LENGTH": size.length}
    options |= {"hidden_size": size.d, "inner_size": 4 * size.d, "n_layers": size.layers}
    options |= {"n_heads": max(size.d // 64, 1), "attn_dropout_prob": 0.0}
    experiment = build("PosSASRec", GENERATED, train_batch_size=size.batch, **options)

    # Train for a while, and extrapolate to an epoch of the whole dataset.
    trainer = experiment.trainer
    loader = trainer.training_loader(experiment.loaders["train"])
    torch.cuda.reset_peak_memory_stats()
    timed = time_steps(trainer, loader, SECONDS)
    part = timed.targets / loader.num_targets / size.whole
    epoch_seconds = timed.seconds / part
    peak_gb = torch.cuda.max_memory_allocated() / GB

    # Compare with the fastest product of matrices in the same precision.
    flops = size.whole * epoch_flops(loader, size.d, size.layers, size.items) / epoch_seconds
    dtype = torch.bfloat16 if trainer.precision.name == "bf16" else torch.float32
    with trainer.precision.rounded_products():
        peak = peak_flops(trainer.device, dtype, PRODUCT)
    rate, of_product = timed.targets / timed.seconds, f"{flops / peak:.0%} of {peak / 1e12:.0f}"
    times = [f"{epoch_seconds:.2f}", f"{part:.0%}", f"{timed.warm_seconds:.1f}", f"{rate:,.0f}"]
    return [*times, f"{flops / 1e12:.1f}", of_product, f"{peak_gb:.1f}"]


def epochs(sizes: tuple[Size, ...], option: str, values: tuple[Any, ...]) -> str:
    """Return a table of epochs, with a row for each size and value.

    Args:
        sizes: sizes of data and model.
        option: name of an option.
        values: its values to compare.
    """
    rows = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            write_log(Path(folder), size.events, size.each, size.items)
            for value in values:
                figures = measure_epoch(size, folder, **{option: value})
                rows.append([f"{size.d}, {size.layers}", str(value), *figures])
    heads = ("d, layers", option, "s an epoch", "measured", "first steps, s", "targets/s")
    return table((*heads, "TFLOP/s", "of a product", "GB"), rows)


def million() -> str:
    """Return a table of the loss over a million items.

    It shows that the loss never holds the scores (logits) of all items at once.
    """
    rows = []
    for dtype in ("float32", "bfloat16"):
        beside_gb, seconds = measure_loss(is_rounded=dtype == "bfloat16")
        logits_gb = POSITIONS * ITEMS * 4 / GB
        rows.append([dtype, f"{beside_gb:.2f}", f"{logits_gb:.2f}", f"{1e3 * seconds:.1f}"])
    return table(("precision", "GB beside weights", "GB of all logits", "ms a step"), rows)


def measure_loss(is_rounded: bool) -> tuple[float, float]:
    """Return memory and time of a training step that consists of the loss alone.

    Args:
        is_rounded: whether products are computed in bfloat16.

    Returns:
        Peak GB beside weights, gradients and optimiser; seconds of a step.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weight = nn.Parameter(0.02 * torch.randn(ITEMS + 1, HIDDEN, device=device))
    optimizer = torch.optim.Adam([weight], fused=True)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()  # makes the optimiser's state, which is not the loss's memory

    hidden = torch.randn(POSITIONS, HIDDEN, device=device, requires_grad=True)
    targets = torch.randint(1, ITEMS + 1, (POSITIONS,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=is_rounded):
            loss = full_cross_entropy(hidden, weight, targets)
        loss.backward()
        optimizer.step()

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()  # warms up
    seconds = mean_seconds(step, 3)
    # Less the gradient that the loss makes, which is as large as the weights.
    added = torch.cuda.max_memory_allocated() - before - weight.numel() * weight.element_size()
    return added / GB, seconds


# name of a section -> the function that makes its table, and its arguments
SECTIONS: dict[str, tuple[Any, ...]] = {
    "ml-20m": (epochs, (ML_20M,), "precision", PRECISIONS),
    "ml-1m": (epochs, (ML_1M,), "precision", PRECISIONS),
    "compile": (epochs, (ML_20M, ML_1M), "compile", (False, True)),
    "million": (million,),
}


def main() -> None:
    """Measure every section in a process of its own, and put its table into the page."""
    page = RESULTS / "gpu.md"
    replace_section(page, "machine", f"{torch.cuda.get_device_name()}; {machine()}.")
    for name, (function, *args) in SECTIONS.items():
        try:
            text = run_alone(function, *args)
        except Exception as error:  # the other sections are measured all the same
            text = f"Failed: {type(error).__name__}: {error}"
        replace_section(page, name, text)


if __name__ == "__main__":
    main()
