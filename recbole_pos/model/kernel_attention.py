"""Kernel attention: a learned positional kernel C = UL inside attention.

Reference:
    Timur Nabiev, Evgeny Frolov. "Position-Aware Sequential Attention for Accurate Next Item
    Recommendations." 2026 (arXiv 2602.21052).

Where its equations are:

=========== ===================================================================
equation    code
=========== ===================================================================
1           ``MultiHeadAttention`` in ``layers/attention.py``
section 2.3 ``LearnedPosition`` in ``position/additive.py`` (the Classic baseline)
6 to 9      ``PositionalKernel`` in ``position/kernel.py``
10, 11      ``Factor``, ``ToeplitzFactor``, ``FullFactor``, same file
=========== ===================================================================

Its baselines are the backbone with another ``position``: nope, learned (Classic), rope and cape.
Table 4's variants are ``kernel_u``, ``kernel_l``, ``kernel_u_shared`` and ``kernel_l_shared``.
Fine-tuning only the kernel of a trained model (section 6.1) is ``recbole-pos attach``.
"""

from __future__ import annotations

from recbole_pos.model.sasrec import PosSASRec


class KernelAttention(PosSASRec):
    """Single-head transformer with a positional kernel on logits and values (Nabiev and Frolov,
    "Position-Aware Sequential Attention for Accurate Next Item Recommendations", 2026,
    equation 9)."""
