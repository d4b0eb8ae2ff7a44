"""Attention of packed sequences by torch's kernels and by our layers: time, and whether outputs and
gradients are the same.

``varlen_attn`` takes packed sequences as they are, for schemes without a bias, and has no kernel
for a CPU. FlexAttention takes a learned bias, and has no gradient on a CPU. No layer uses either
yet: the results on a GPU decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from training import Size, mean_seconds

from recbole_pos.layers.attention import biased_attention
from recbole_pos.layers.context import SequenceContext, future_mask

HEAD = ["sequences", "bias", "kernel", "ms", "output off by", "gradients off by", "agrees"]
STEPS = 10
AGREES = 4.0  # a kernel that agrees is at most so many times as far off as ours in that precision


@dataclass(frozen=True)
class Case:
    """Inputs of attention: [m, h, e] in packed order, and a [1, h, t, t] bias or None."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    ctx: SequenceContext

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that have a gradient."""
        return [x for x in (self.query, self.key, self.value, self.bias) if x is not None]

    def to(self, dtype: torch.dtype) -> Case:
        """Return the same numbers in another type, as leaves."""
        cast = [x.detach().to(dtype).requires_grad_() for x in self.inputs]
        return Case(cast[0], cast[1], cast[2], None if self.bias is None else cast[3], self.ctx)


Kernel = Callable[[Case], Tensor]  # to [m, h, e]


def make_case(size: Size, sequences: int, biased: bool, device: torch.device) -> Case:
    """Return histories as long as MovieLens', with normal vectors."""
    torch.manual_seed(0)
    lengths = (68 * torch.randn(sequences).mul(1.2).exp()).long().clamp(2, size.length)
    heads = max(size.d // 64, 1)
    items = torch.ones(int(lengths.sum()), dtype=torch.int64, device=device)
    width = int(lengths.max())
    ctx = SequenceContext.from_lengths(lengths.to(device), size.length, items=items, width=width)
    shape = (3, len(items), heads, size.d // heads)
    query, key, value = torch.randn(shape, device=device).unbind()
    bias = torch.randn(1, heads, width, width, device=device) if biased else None
    return Case(query, key, value, bias, ctx)


def _blocks(case: Case) -> list[Tensor]:
    """Return query, key and value as [b, h, t, e]."""
    return [case.ctx.pad(x, "start").transpose(1, 2) for x in (case.query, case.key, case.value)]


def padded(case: Case) -> Tensor:
    """Return attention as ``layers/attention.py`` computes it."""
    if case.bias is None:
        out = F.scaled_dot_product_attention(*_blocks(case), is_causal=True)
    else:
        unseen = future_mask(case.ctx.width, case.query.device)
        out = biased_attention(*_blocks(case), case.bias.masked_fill(unseen, -torch.inf))
    return case.ctx.unpad(out.transpose(1, 2), "start")


def varlen(case: Case) -> Tensor:
    """Return attention by torch's wrapper of FlashAttention."""
    from torch.nn.attention.varlen import varlen_attn

    ends = F.pad(case.ctx.lengths.cumsum(0), (1, 0)).to(torch.int32)
    width = case.ctx.width
    given = (case.query, case.key, case.value)
    return varlen_attn(*given, ends, ends, width, width, window_size=(-1, 0))


class Flex:
    """FlexAttention with a learned bias and the causal mask, compiled once."""

    def __init__(self) -> None:
        from torch.nn.attention.flex_attention import flex_attention

        self.attention = torch.compile(flex_attention)

    def __call__(self, case: Case) -> Tensor:
        bias = case.bias
        assert bias is not None

        def score(logit: Tensor, b: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.where(i >= j, logit + bias[0, head, i, j], -torch.inf)

        out = self.attention(*_blocks(case), score_mod=score)
        return case.ctx.unpad(out.transpose(1, 2), "start")


def list_kernels(device: torch.device, is_biased: bool) -> dict[str, Kernel]:
    """Return the kernels to compare; on a CPU ours only."""
    kernels: dict[str, Kernel] = {"layers": padded}
    if device.type == "cuda":
        kernels |= {"flex": Flex()} if is_biased else {"varlen": varlen}
    return kernels


def run_kernel(kernel: Kernel, case: Case, upstream: Tensor) -> list[Tensor]:
    """Return the output, and gradients to all inputs."""
    out = kernel(case)
    return [out.detach(), *torch.autograd.grad(out, case.inputs, upstream.to(out.dtype))]


def relative_errors(tensors: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Return the largest errors of output and gradients, as a part of the largest right number."""
    errors = [
        float((x.float() - y.float()).abs().max() / y.float().abs().max())
        for x, y in zip(tensors, expected, strict=True)
    ]
    return [errors[0], max(errors[1:])]


def compare(case: Case, kernels: dict[str, Kernel]) -> Iterator[list[str]]:
    """Yield time and errors of kernels in bfloat16 against the first of them in float32.

    A kernel agrees if its errors are those of rounding, which the first has in bfloat16.
    """
    device = case.query.device
    upstream = torch.randn_like(case.query)
    first = next(iter(kernels.values()))
    expected = run_kernel(first, case.to(torch.float32), upstream)
    short = case.to(torch.bfloat16)
    rounding = relative_errors(run_kernel(first, short, upstream), expected)
    for name, kernel in kernels.items():
        try:
            errors = relative_errors(run_kernel(kernel, short, upstream), expected)
            seconds = mean_seconds(partial(run_kernel, kernel, short, upstream), STEPS, device)
        except (RuntimeError, NotImplementedError) as error:
            yield [name, "-", "-", "-", f"fails: {str(error).splitlines()[0][:80]}"]
            continue
        agrees = all(x <= AGREES * y + 1e-6 for x, y in zip(errors, rounding, strict=True))
        figures = [f"{1e3 * seconds:.2f}", *(f"{x:.1e}" for x in errors)]
        yield [name, *figures, "yes" if agrees else "NO"]


def attention(cases: list[tuple[Size, int]]) -> Iterator[list[str]]:
    """Yield a row for each kernel of each case, forward and backward."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    yield HEAD
    for size, sequences in cases:
        for is_biased in (False, True):
            case = make_case(size, sequences, is_biased, device)
            labels = [f"{sequences}, d = {size.d}", "learned" if is_biased else "none"]
            for row in compare(case, list_kernels(device, is_biased)):
                yield [*labels, *row]
