"""On what a run computes: the device, its threads and memory, the precision of training.

Weights, sums, norms and the optimiser are in float32, and so is evaluation.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.dataset import Dataset
from recbole_pos.data.splits import TRAIN
from recbole_pos.errors import UsageError
from recbole_pos.tables.storage import get_memory_limit
from recbole_pos.values import Options, shown

CPUINFO = Path("/proc/cpuinfo")  # Linux
ANY_GPU = "0"  # RecBole's default of gpu_id: a GPU where there is one


def count_cores() -> int:
    """Return the number of cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_device(config: PosConfig) -> None:
    """Refuse a GPU that is missing, since RecBole would silently use the CPU instead.

    Args:
        config: configuration of the run. Its ``plain`` has the options as they were given: the
            ``gpu_id`` that the user asks for. ``device`` is what RecBole has made of it: the CPU
            if torch does not see that GPU.

    Raises:
        UsageError: if the user asks for a GPU, and torch sees none of this number.
    """
    # An empty ``gpu_id`` asks for the CPU. "0" (ANY_GPU) is RecBole's default, so the user may not
    # have asked for a GPU: the run uses one if there is one.
    gpu_id = str(config.plain["gpu_id"]).strip()
    asks_for_gpu = config["use_gpu"] and gpu_id not in ("", ANY_GPU)
    if asks_for_gpu and config["device"].type == "cpu":
        raise UsageError(f"gpu_id: {shown(gpu_id)} is not there; --use_gpu=False trains on the CPU")


def configure_for_gpus(plain: dict[str, Any], gpu_id: str) -> PosConfig:
    """Return the configuration with which one process trains on its own GPUs.

    Args:
        plain: options of the whole run, which were checked when it began.
        gpu_id: numbers of the GPUs of this process, such as "0,1"; "" for CPUs.
    """
    # Without ``strict``, options are not checked again.
    config = PosConfig(config_dict={**plain, "gpu_id": gpu_id}, strict=False)
    # The options in ``plain`` are written into the run folder. There ``gpu_id`` stays that of the
    # whole run, so that a resumed run uses all of its GPUs.
    config.plain["gpu_id"] = plain["gpu_id"]
    return config


def describe_device(config: Options) -> dict[str, Any]:
    """Describe the device of a run, for its result.

    Args:
        config: configuration of the run.

    Returns:
        ``name`` of the GPU, or cpu; ``processor`` (its model and vector instructions) for a CPU;
        number of ``threads``; and ``precision``, in words such as "float32".
    """
    device = config["device"]
    if device.type == "cuda":
        hardware = {"name": torch.cuda.get_device_name(device)}
    else:
        hardware = {"name": device.type, "processor": _describe_cpu()}
    # ``_PRECISION_WORDS`` has the words for each name of a precision, such as fp32.
    precision = _PRECISION_WORDS[Precision.from_config(config).name]
    return {**hardware, "threads": torch.get_num_threads(), "precision": precision}


def _describe_cpu() -> str:
    """Return the model and vector instructions of the CPU, such as ``AMD EPYC, AVX512``.

    Both decide how sums are rounded, so on another CPU the same run ends with other weights.
    """
    # Linux names the model more precisely than Python. Other systems do not have this file
    # (/proc/cpuinfo).
    model = platform.processor()
    with suppress(OSError):
        text = CPUINFO.read_text("utf-8", errors="replace")
        line = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
        model = line[1].strip() if line else model
    instructions = torch.backends.cpu.get_cpu_capability()
    return f"{model}, {instructions}" if model else instructions


# All but cuDNN's attention, torch's first choice in half precision: it plans for 4 ms on the host
# for every new shape, which nearly every batch has: 60% of an epoch of ml-1m's sizes on an H200.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_PRECISION_WORDS = {
    "fp32": "float32",
    "tf32": "float32 with TF32 products",
    "bf16": "float32 with bfloat16 products",
}


@dataclass(frozen=True)
class Precision:
    """The precision in which a run trains, fp32, tf32 or bf16, and the type of its device."""

    name: str
    device: str

    @classmethod
    def from_config(cls, config: Options) -> Precision:
        """Return the precision of a configuration; ``auto`` is tf32, or bf16 under ``enable_amp``.

        On devices other than CUDA, tf32 becomes fp32: their products have full precision.

        Args:
            config: configuration, with the options ``precision`` and ``enable_amp``, and the
                device.
        """
        device, name = config["device"].type, config["precision"]
        # enable_amp is RecBole's option for half precision, which users of RecBole may have set.
        if name == "auto":
            name = "bf16" if config["enable_amp"] else "tf32"
        if name == "tf32" and device != "cuda":
            name = "fp32"
        return cls(name, device)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Compute products in bfloat16 in a ``with`` block, if that is the precision of the run.

        The name of the run's precision is ``name``. For fp32 and tf32 nothing changes.
        """
        if self.name != "bf16":
            yield
            return
        # torch has several implementations of attention. It may choose among those in _ATTENTION,
        # which are all but cuDNN's: that one needs milliseconds to prepare for each new shape, and
        # nearly every batch has a new shape.
        with torch.autocast(self.device, torch.bfloat16), sdpa_kernel(_ATTENTION):
            yield

    @contextmanager
    def rounded_products(self) -> Iterator[None]:
        """Let a GPU round float32 products to TF32, in a ``with`` block, except under fp32.

        TF32 has the range of float32 with fewer digits, and is faster. The setting is of the whole
        process, and is put back at the end. ``name`` is the precision of the run.
        """
        previous = torch.get_float32_matmul_precision()
        if self.device == "cuda" and self.name != "fp32":
            torch.set_float32_matmul_precision("high")  # TF32
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(previous)


# --- memory ---


def require_score_memory(config: Options, dataset: Dataset, num_items: int) -> None:
    """Refuse an ``eval_batch_size`` with which the scores of one batch exceed the memory.

    A batch of an evaluation has a row of scores, a number for each item, for each target (an
    interaction that is held out to be predicted).

    Args:
        config: configuration of the run.
        dataset: the dataset; a batch has no more rows than there are held-out targets.
        num_items: number of items that are scored at a time.
    """
    # ``part`` has the phase of each interaction: training, validation or test.
    num_targets = int(np.count_nonzero(dataset.split.is_target & (dataset.part != TRAIN)))
    num_rows = min(config["eval_batch_size"], num_targets)
    if 4 * num_rows * num_items > get_memory_limit():  # bytes of float32
        raise UsageError(
            f"eval_batch_size: scores for {num_items:,} items do not fit into memory; at most "
            f"{get_memory_limit() // (4 * num_items):,} rows do"
        )
