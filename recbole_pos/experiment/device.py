"""On what a run computes: the device, its threads, the precision."""

from __future__ import annotations

import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.experiment.precision import Precision
from recbole_pos.values import Options, shown

CPUINFO = Path("/proc/cpuinfo")  # Linux
ANY_GPU = "0"  # RecBole's default of gpu_id: a GPU where there is one


def require_device(config: PosConfig) -> None:
    """A GPU that was asked for by its number must be there; without one RecBole takes the CPU.

    Raises:
        UsageError: if it is not, or what is given is no number.
    """
    wanted = str(config.plain["gpu_id"]).strip()
    if not re.fullmatch(r"(\d+(\s*,\s*\d+)*)?", wanted):
        raise UsageError(
            f"gpu_id: expected numbers of GPUs such as 0 or '0,1', or nothing; found "
            f"{shown(wanted)}"
        )
    if config["use_gpu"] and wanted not in ("", ANY_GPU) and config["device"].type == "cpu":
        raise UsageError(
            f"gpu_id: {wanted} is not there: torch {torch.__version__} sees no GPU of that number. "
            "--use_gpu=False trains on the CPU"
        )


def describe_device(config: Options) -> dict[str, Any]:
    """``name`` (that of a GPU, or cpu), ``processor`` of a CPU, ``threads`` of this process and
    ``precision``."""
    device = config["device"]
    on_gpu = device.type == "cuda"
    return {
        "name": torch.cuda.get_device_name(device) if on_gpu else device.type,
        **({} if on_gpu else {"processor": _processor()}),
        "threads": torch.get_num_threads(),
        "precision": Precision.of(config).words,
    }


def _processor() -> str:
    """``AMD EPYC, AVX512``: what decides how sums are rounded.

    On another kind of CPU the same run comes out the same up to rounding alone, which grows from
    epoch to epoch.
    """
    model = platform.processor()
    with suppress(OSError, UnicodeDecodeError):
        found = re.search(r"^model name\s*:\s*(.+)$", CPUINFO.read_text("utf-8"), re.MULTILINE)
        model = found[1].strip() if found else model
    return ", ".join(part for part in (model, torch.backends.cpu.get_cpu_capability()) if part)


def device_line(described: dict[str, Any]) -> str:
    """The same in words: ``cpu with 2 threads in float32``."""
    threads = described["threads"]
    return (
        f"{described['name']} with {threads} thread{'s' if threads > 1 else ''} in "
        f"{described['precision']}"
    )
