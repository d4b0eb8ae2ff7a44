"""PARec and FPARec: attention that is a learned function of positions only.

Reference:
    Fan Luo, Juan Zhang, Shenghui Xu. "Learning Positional Attention for Sequential Recommendation."
    2024 (arXiv 2407.02793).

Where its equations are:

=========== ===================================================================
equation    code
=========== ===================================================================
5, 6        ``PositionMatrix`` in ``position/positional_attention.py``
7           ``FactorizedPositionMatrix``, same file
8           ``FeedForward`` in ``layers/attention.py``
9           ``PosSASRec.encode`` (final ``LayerNorm``)
10          ``PosRecommender.full_sort_predict`` in ``model/base.py``
11          ``full_cross_entropy`` in ``layers/losses.py``
12 to 15    ``FixedPattern`` and its subclasses, with ``position/positional_attention.py``
=========== ===================================================================

The models are the backbone with ``position: [learned, fparec]`` (or ``parec``), pre-norm, ReLU and
no query, key or output projection, as ``properties/model/*.yaml`` says. Learned input
positions are kept, as in the authors' public code; ``position: [fparec]`` leaves them out.
"""

from __future__ import annotations

from recbole_pos.model.sasrec import PosSASRec


class PARec(PosSASRec):
    """Positional attention with one learned [n, n] matrix per layer (Luo et al.,
    "Learning Positional Attention for Sequential Recommendation", 2024, equation 6)."""


class FPARec(PosSASRec):
    """Positional attention with the matrix factorized into two [n, k] factors (Luo et al.,
    "Learning Positional Attention for Sequential Recommendation", 2024, equation 7)."""
