"""Products whose factors are rounded to a shorter type while their sums have all of float32.

Autocast rounds what comes out, too, and so logits of 16 by up to 0.06 under bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

# On GPUs, from torch 2.8 on, factors of a shorter type may give float32 without a copy of them.
_MIXED = "dtype_out" in torch.ops.aten.mm.overloads()


def autocast_type(device: torch.device) -> torch.dtype | None:
    """What autocast rounds factors to at this place; None where it is off."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """a @ b into ``out``, summed in the type of ``out``.

    Args:
        a: [i, j].
        b: [j, k], of the type of ``a``: that of ``out``, or a shorter one.
        out: [i, k].
    """
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    if a.is_cuda and _MIXED and out.dtype == torch.float32:
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    return torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)  # TF32 holds bfloat16 exactly


def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a @ b added to ``total``, [i, k], and summed in its type; a and b as in :func:`product`."""
    if a.dtype == total.dtype:
        return total.addmm_(a, b)
    return total.add_(product(a, b, torch.empty_like(total)))
