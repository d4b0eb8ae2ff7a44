"""On what a run computes: the device, its threads, the precision."""

from __future__ import annotations

import contextlib
import logging
import platform
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.values import Options, shown

CPUINFO = Path("/proc/cpuinfo")  # Linux
ANY_GPU = "0"  # RecBole's default of gpu_id: a GPU where there is one


def require_device(config: PosConfig) -> None:
    """A GPU that was asked for by its number must be there; without one RecBole takes the CPU.

    Raises:
        UsageError: if it is not, or what is given is not a number.
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
    """Return the same in words: ``cpu with 2 threads in float32``."""
    threads = described["threads"]
    return (
        f"{described['name']} with {threads} thread{'s' if threads > 1 else ''} in "
        f"{described['precision']}"
    )


# --- precision: in what numbers a step multiplies. Weights, sums, norms and the optimiser have
# float32, and evaluation is in float32 whatever this says. ---

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Without cuDNN's, torch's first choice in half precision: it plans for 4 ms on the host for every
# new shape, and nearly every batch has one: 60% of an epoch of ml-1m's sizes on an H200.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_WORDS = {
    "fp32": "float32",
    "tf32": "float32 with TF32 products",
    "bf16": "float32 with bfloat16 products",
    "fp16": "float32 with float16 products",
}


@dataclass(frozen=True)
class Precision:
    """What ``precision`` comes to on a device.

    Attributes:
        name: fp32, tf32, bf16 or fp16.
        device: type of the device.
    """

    name: str
    device: str

    @classmethod
    def of(cls, config: Options) -> Precision:
        """Resolve ``auto``: bf16 where ``enable_amp`` asks for it, else the fastest measured."""
        device, name = config["device"].type, config["precision"]
        if name == "auto":
            name = "bf16" if config["enable_amp"] else "tf32"
        if name == "tf32" and device != "cuda":
            name = "fp32"  # what the products of a CPU are, too
        return cls(name, device)

    @property
    def words(self) -> str:
        """For people."""
        return _WORDS[self.name]

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around what makes a loss; its gradient follows the same types."""
        kind = _TYPES.get(self.name)
        if kind is None:
            yield
            return
        with torch.autocast(self.device, kind), sdpa_kernel(_ATTENTION):
            yield

    def steps(self) -> AbstractContextManager:
        """Around training steps: products that stay float32 may round their factors to TF32."""
        return _tf32() if self.device == "cuda" and self.name != "fp32" else nullcontext()

    def scaler(self) -> torch.amp.GradScaler:
        """Keeps small gradients of float16 from vanishing; does nothing for the others."""
        return torch.amp.GradScaler(self.device, enabled=self.name == "fp16")


@contextlib.contextmanager
def _tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def check_precision(config: Options) -> None:
    """Before a run starts: what its device cannot do is an error, what slows it a warning.

    Raises:
        UsageError: if float16 is asked of a CPU, or RecBole's switches differ from
            ``precision``.
    """
    made, name = Precision.of(config), config["precision"]
    if config["enable_amp"] and name not in ("auto", "bf16"):
        raise UsageError(f"enable_amp: True is precision: bf16, found {name}; leave one out")
    if config["enable_scaler"] and name != "fp16":
        raise UsageError(
            "enable_scaler: only float16 needs a scaled loss, and precision: fp16 has one"
        )
    if made.device != "cpu":
        return
    if made.name == "fp16":
        raise UsageError("precision: fp16 needs a GPU; on a CPU take fp32")
    if config["compile"]:
        logging.getLogger(__name__).warning(
            "compile: True is for GPUs: on a CPU steps are no faster for it"
        )
    if made.name == "bf16" and not _multiplies_bfloat16():
        logging.getLogger(__name__).warning(
            "precision: bf16 is slower than fp32 on this CPU, which has no AMX to multiply with"
        )


def _multiplies_bfloat16() -> bool:
    """Return whether this CPU has AMX; torch says it under a name that may go."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())
