"""TO-RoPE: time and order as rotary angles.

Reference:
    Xiaokai Wei, Jiajun Wu, Daiyao Yi, Reza Shirkavand, Michelle Gong. "Rotate Both Ways:
    Time-and-Order RoPE for Generative Recommendation." 2025 (arXiv 2510.20455).

Where its equations are:

=========== ===================================================================
equation    code
=========== ===================================================================
1           ``rotate_pairs`` in ``position/rotary.py``
2           ``RotaryPosition``, same file (index-only RoPE)
3, sec. 3.2 ``base_form``, ``wavelength_form`` in ``position/rotary.py``;
            ``TimeRotaryPosition`` in ``position/time_rotary.py`` (time-only RoPE)
4, 5, 6     ``TimeOrderRotaryPosition``, same file; 5 and 6 are ``fusion: early``
9, sec. 4.3 same class, ``fusion: split_dim``; section 4.4: ``split_head``
=========== ===================================================================

Baselines of Tables 3 and 4 are the same backbone with another ``position``: [learned] (index APE),
[learned, time_learned] (and time APE), [hstu] (relative bias), [rope], [time_rope], and
[rope, time_learned].
"""

from __future__ import annotations

from recbole_pos.model.sasrec import PosSASRec


class TORoPE(PosSASRec):
    """Pre-norm decoder (GPT-2 style) whose heads turn by order and by time (Wei et al., "Rotate
    Both Ways: Time-and-Order RoPE for Generative Recommendation", 2025, equation 4)."""
