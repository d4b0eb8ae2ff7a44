"""From an exported program to ONNX, and what its exporter lacks."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram

from recbole_pos.errors import UsageError


def require_onnx() -> None:
    """
    Raises:
        UsageError: if what writes and runs ONNX is not installed.
    """
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"--format onnx needs {error.name}, which is not installed: "
            "pip install 'recbole-pos[export]'; or choose --format torch_export"
        ) from error


def write_onnx(
    program: ExportedProgram, path: Path, inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> None:
    """Write a program; ``allowed``, if among its inputs, may then be left out: all items are.

    Raises:
        UsageError: if ONNX lacks what the program does.
    """
    import onnx_ir

    try:
        with _quiet():
            program = program.run_decompositions({torch.ops.aten.cummin.default: _running_minimum})
            made = torch.onnx.export(
                program,
                input_names=inputs,
                output_names=outputs,
                custom_translation_table={torch.ops.aten.scalar_tensor.default: _scalar},
                verbose=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        lines = str(error.__cause__ or error).splitlines()
        raise UsageError(
            f"the model cannot be written as ONNX: {lines[0]}; choose --format torch_export"
        ) from error
    assert made is not None
    for value in made.model.graph.inputs:
        if value.name == "allowed":
            assert value.shape is not None
            all_ = np.ones((1, int(str(value.shape[1]))), dtype=bool)
            value.const_value = onnx_ir.tensor(all_, name="allowed")
            made.model.graph.initializers["allowed"] = value
    made.save(str(path))


def _running_minimum(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """``cummin`` of floats, of which ONNX has none; places are not told, and nobody reads them."""
    place = torch.arange(x.size(dim), device=x.device)
    later = place[:, None] < place
    found = x.movedim(dim, -1).unsqueeze(-2).masked_fill(later, torch.inf).amin(-1)
    return found.movedim(-1, dim), torch.zeros_like(found, dtype=torch.int64)


def _scalar(
    value: Any,
    dtype: Any = 1,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Any:
    """A number in the type asked for; torch's own goes by way of float32, which takes from angles
    of seconds since 1970 what they say."""
    import onnx
    from onnxscript import opset18

    if not isinstance(value, (int, float)):  # a size, known when it runs
        return opset18.Cast(value, to=int(dtype))
    return opset18.Constant(value=onnx.helper.make_tensor("scalar", int(dtype), (), [value]))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter tells of itself and of packages that are not asked for."""
    logs = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
