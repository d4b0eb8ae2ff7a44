"""Draws the fixed patterns of FPARec's paper, its Figure 4: results/fparec-patterns.png.

python studies/fparec/patterns.py [OUT.png]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from recbole_pos.inspect.pictures import draw_triangles
from recbole_pos.layers.hooks import Dimensions
from recbole_pos.position.schemes import SCHEMES

PATTERNS = ("average", "linear_annealing", "exponential_annealing")
EVENTS = 50
OUT = Path(__file__).resolve().parents[2] / "results" / "fparec-patterns.png"


def pattern(name: str) -> np.ndarray:
    """[t, t] the weights of a scheme, every row divided by its largest, as in the figure."""
    sizes = Dimensions(max_length=EVENTS, hidden_size=1, n_heads=1, initializer_range=0.0)
    weights = SCHEMES[name](sizes).weights(EVENTS)[0].numpy()
    return weights / weights.max(-1, keepdims=True)


if __name__ == "__main__":
    shown = {name.replace("_", " "): pattern(name) for name in PATTERNS}
    titles = ("Fixed patterns of attention", "every row divided by its largest weight")
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    print(draw_triangles(shown, titles, "weight / largest of its row", out))
