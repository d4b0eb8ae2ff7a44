"""Draws the trained factors U and L of a kernel, less the identity that they begin as.

    python studies/kernel_attention/kernels.py RUN_DIR    # writes RUN_DIR/kernel.png

They are in Figures 1 and 2 of the kernel attention paper (Nabiev and Frolov). The attention of the
same run is drawn by ``recbole-pos inspect attention RUN_DIR``.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

import recbole_pos as rp
from recbole_pos.experiment.pictures import draw_maps
from recbole_pos.position.kernel import PositionalKernel


@torch.no_grad()
def kernel_factors(model: nn.Module) -> dict[str, np.ndarray]:
    """Return the factors [n, n] of every layer by name: U upper triangular, L lower triangular."""
    kernels = [module for module in model.modules() if isinstance(module, PositionalKernel)]
    factors: dict[str, np.ndarray] = {}
    for name in ("U", "L"):
        for number, kernel in enumerate(kernels, 1):
            factor = getattr(kernel, name)
            if factor is not None:
                matrix = factor.matrix(model.max_seq_length).cpu().numpy()
                layer = "all layers" if kernel.shared[name] else f"layer {number}"
                factors[f"{name}, {layer}"] = matrix.T if name == "U" else matrix
    return factors


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Draw the factors of a trained kernel.")
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    run = parser.parse_args(arguments).run
    factors = kernel_factors(rp.load(run).model)
    panels = [(name, matrix - np.eye(len(matrix))) for name, matrix in factors.items()]
    titles = ("Positional kernel", "without the identity that it begins as")
    axes = ("column: interaction (0: newest)", "row: interaction (0: newest)")
    print(draw_maps(panels, titles, axes, "weight - identity", run / "kernel.png"))


if __name__ == "__main__":
    main()
