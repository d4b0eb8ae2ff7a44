"""Draws figures of FPARec's paper, every row of a matrix divided by its largest entry.

    python studies/fparec/patterns.py            # Figure 4: fixed patterns, fparec-patterns.png
    python studies/fparec/patterns.py RUN_DIR    # Figures 1 and 3, into the folder of the run

Figure 1 (positions.png) shows exp(p_i . p_j / sqrt(d)) of learned positions p, Figure 3
(attention_by_position.png) the weights of attention by position; each if the model has them.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

import recbole_pos as rp
from recbole_pos.experiment.pictures import draw_maps
from recbole_pos.layers.hooks import Dimensions
from recbole_pos.position.additive import PositionEncoding
from recbole_pos.position.positional_attention import PositionalAttention
from recbole_pos.position.schemes import SCHEMES

FIXED = ("average", "linear_annealing", "exponential_annealing")
LENGTH = 50  # interactions of the fixed patterns
OUT = Path(__file__).resolve().parents[2] / "results" / "fparec-patterns.png"


def fixed_patterns() -> dict[str, np.ndarray]:
    """Return the weights [t, t] of the fixed patterns by name."""
    sizes = Dimensions(max_length=LENGTH, hidden_size=1, n_heads=1, initializer_range=0.0)
    return {
        name.replace("_", " "): SCHEMES[name](sizes).weights(LENGTH)[0].numpy() for name in FIXED
    }


@torch.no_grad()
def positional_weights(model: nn.Module) -> dict[str, np.ndarray]:
    """Return the weights [n, n] of attention by position, by layer and head (section 4.7)."""
    layers = [module for module in model.modules() if isinstance(module, PositionalAttention)]
    return {
        f"layer {number}, head {head}": matrix.cpu().numpy()
        for number, layer in enumerate(layers, 1)
        for head, matrix in enumerate(layer.weights(model.max_seq_length), 1)
    }


@torch.no_grad()
def similarities(model: nn.Module) -> dict[str, np.ndarray]:
    """Return exp(p_i . p_j / sqrt(d)) [n, n] of each encoding of positions (appendix A)."""
    matrices = {}
    for module in model.modules():
        if isinstance(module, PositionEncoding):
            position = torch.arange(module.max_length, device=model.device)
            p = module.rows(position, position.flip(0)).double()  # older, and newer interactions
            logits = (p @ p.t() / p.size(1) ** 0.5).tril()
            # the largest of a row is taken off first, so that exp stays in range
            matrices[type(module).__name__] = (logits - logits.amax(-1, True)).exp().cpu().numpy()
    return matrices


def draw(matrices: dict[str, np.ndarray], title: str, file: Path) -> None:
    """Draw the lower triangles of matrices [t, t] by name, rows divided by their largest entry."""
    lower = [np.where(np.tri(len(matrix)), matrix, np.nan) for matrix in matrices.values()]
    lower = [matrix / np.nanmax(matrix, -1, keepdims=True) for matrix in lower]
    smallest = min(min(map(np.nanmin, lower)), 1 - 1e-6)  # so that small differences show
    panels = list(zip(matrices, lower, strict=True))
    axes = ("key interaction (0: newest)", "query interaction (0: newest)")
    colors = {"cmap": "Blues", "vmin": smallest, "vmax": 1}
    print(draw_maps(panels, [title], axes, "entry / largest of its row", file, colors=colors))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Draw figures of FPARec's paper.")
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN_DIR")
    run = parser.parse_args(arguments).run
    if run is None:
        draw(fixed_patterns(), "Fixed patterns of attention", OUT)
        return
    model = rp.load(run).model
    if matrices := similarities(model):
        draw(matrices, "exp(p_i . p_j / sqrt(d)) of positions", run / "positions.png")
    if matrices := positional_weights(model):
        draw(matrices, "Attention by position", run / "attention_by_position.png")


if __name__ == "__main__":
    main()
