"""In what numbers a training step multiplies; weights, sums, norms and the optimiser have float32.

Evaluation is in float32 whatever this says.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from recbole_pos.errors import UsageError
from recbole_pos.values import Options

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
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
        """``auto``, where ``enable_amp`` asks for nothing: bf16 on a GPU that has it, else fp32."""
        device, name = config["device"].type, config["precision"]
        if name == "auto":
            has = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
            name = "bf16" if config["enable_amp"] or has else "fp32"
        if name == "tf32" and device != "cuda":
            name = "fp32"  # what the products of a CPU are, too
        return cls(name, device)

    @property
    def words(self) -> str:
        """For people."""
        return _WORDS[self.name]

    def forward(self) -> AbstractContextManager:
        """Around what makes a loss; its gradient follows the same types."""
        kind = _TYPES.get(self.name)
        return torch.autocast(self.device, kind, enabled=kind is not None)

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
        UsageError: if float16 is asked of a CPU, or RecBole's switches say something else than
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
            "compile: True is for GPUs: on a CPU it compiles for minutes, and steps are no faster"
        )
    if made.name == "bf16" and not _multiplies_bfloat16():
        logging.getLogger(__name__).warning(
            "precision: bf16 is slower than fp32 on this CPU, which has no AMX to multiply with"
        )


def _multiplies_bfloat16() -> bool:
    """Whether this CPU has AMX; torch says it under a name that may go."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())
