"""Attention of packed sequences by the kernels that torch has, beside what layers do: time, and
whether outputs and gradients are the same.

``varlen_attn`` and jagged tensors take packed events as they are, for schemes without a bias; they
have no kernel for a CPU. FlexAttention takes a learned bias, and has no gradient on a CPU. So no
layer uses any of them yet: what this finds on a card decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from training import Size, synchronise

from recbole_pos.layers.attention import biased_attention
from recbole_pos.layers.context import SequenceContext, future_mask

HEAD = ["sequences", "bias", "kernel", "ms", "output off by", "gradients off by", "agrees"]
STEPS, AGREES = 10, 4.0  # times as far off as ours in the same precision may a kernel be


@dataclass(frozen=True)
class Case:
    """What attention is asked: [m, h, e] in packed order, and a [1, h, t, t] bias or None."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    ctx: SequenceContext

    @property
    def inputs(self) -> list[Tensor]:
        """What has a gradient."""
        given = (self.query, self.key, self.value, self.bias)
        return [x for x in given if x is not None]

    def to(self, kind: torch.dtype) -> Case:
        """The same numbers in another type, as leaves."""
        given = (self.query, self.key, self.value, self.bias)
        cast = [x if x is None else x.detach().to(kind).requires_grad_() for x in given]
        return Case(cast[0], cast[1], cast[2], cast[3], self.ctx)


Kernel = Callable[[Case], Tensor]  # to [m, h, e]


def make_case(size: Size, sequences: int, biased: bool, device: torch.device) -> Case:
    """Histories as long as MovieLens', normal vectors."""
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
    """[b, h, t, e] of query, key and value."""
    return [case.ctx.pad(x, "start").transpose(1, 2) for x in (case.query, case.key, case.value)]


def padded(case: Case) -> Tensor:
    """As ``layers/attention.py`` does."""
    if case.bias is None:
        out = F.scaled_dot_product_attention(*_blocks(case), is_causal=True)
    else:
        unseen = future_mask(case.ctx.width, case.query.device)
        out = biased_attention(*_blocks(case), case.bias.masked_fill(unseen, -torch.inf))
    return case.ctx.unpad(out.transpose(1, 2), "start")


def varlen(case: Case) -> Tensor:
    """torch's wrapper of FlashAttention."""
    from torch.nn.attention.varlen import varlen_attn

    ends, width = _offsets(case).to(torch.int32), case.ctx.width
    given = (case.query, case.key, case.value)
    return varlen_attn(*given, ends, ends, width, width, window_size=(-1, 0))


def jagged(case: Case) -> Tensor:
    """Nested tensors, for which torch chooses a kernel."""
    offsets, width = _offsets(case), case.ctx.width
    nested = [
        torch.nested.nested_tensor_from_jagged(x, offsets, min_seqlen=1, max_seqlen=width)
        for x in (case.query, case.key, case.value)
    ]
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in nested), is_causal=True)
    return out.transpose(1, 2).values()


def _offsets(case: Case) -> Tensor:
    return F.pad(case.ctx.lengths.cumsum(0), (1, 0))


class Flex:
    """FlexAttention with a learned bias and the causal mask, compiled once."""

    def __init__(self, compiled: bool = True) -> None:
        from torch.nn.attention.flex_attention import flex_attention

        self.attention = torch.compile(flex_attention) if compiled else flex_attention

    def __call__(self, case: Case) -> Tensor:
        """As the other kernels."""
        bias = case.bias
        assert bias is not None

        def score(logit: Tensor, b: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.where(i >= j, logit + bias[0, head, i, j], -torch.inf)

        out = self.attention(*_blocks(case), score_mod=score)
        return case.ctx.unpad(out.transpose(1, 2), "start")


def kernels(device: torch.device, biased: bool) -> dict[str, Kernel]:
    """Those to try; a CPU has ours alone."""
    found: dict[str, Kernel] = {"layers": padded}
    if device.type == "cuda":
        found |= {"flex": Flex()} if biased else {"varlen": varlen, "jagged": jagged}
    return found


def results(kernel: Kernel, case: Case, upstream: Tensor) -> list[Tensor]:
    """Output, and gradients to all inputs."""
    out = kernel(case)
    return [out.detach(), *torch.autograd.grad(out, case.inputs, upstream.to(out.dtype))]


def off_by(found: list[Tensor], want: list[Tensor]) -> list[float]:
    """Largest differences of output and gradients, as a part of the largest of what is right."""
    each = [
        float((x.float() - y.float()).abs().max() / y.float().abs().max())
        for x, y in zip(found, want, strict=True)
    ]
    return [each[0], max(each[1:])]


def compared(case: Case, tried: dict[str, Kernel]) -> Iterator[list[str]]:
    """Kernels in bfloat16 against the first of them in float32: ms, how far off, and if that is
    more than rounding, which the first in bfloat16 shows."""
    device = case.query.device
    upstream = torch.randn_like(case.query)
    first = next(iter(tried.values()))
    want = results(first, case.to(torch.float32), upstream)
    short = case.to(torch.bfloat16)
    rounding = off_by(results(first, short, upstream), want)
    for name, kernel in tried.items():
        try:
            off = off_by(results(kernel, short, upstream), want)
            synchronise(device)
            started = time.perf_counter()
            for _ in range(STEPS):
                results(kernel, short, upstream)
            synchronise(device)
        except (RuntimeError, NotImplementedError) as error:
            yield [name, "-", "-", "-", f"fails: {str(error).splitlines()[0][:80]}"]
            continue
        spent = 1e3 * (time.perf_counter() - started) / STEPS
        agrees = all(x <= AGREES * y + 1e-6 for x, y in zip(off, rounding, strict=True))
        yield [name, f"{spent:.2f}", *(f"{x:.1e}" for x in off), "yes" if agrees else "NO"]


def attention(cases: list[tuple[Size, int]]) -> Iterator[list[str]]:
    """A row for each kernel of each case, forward and backward."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    yield HEAD
    for size, sequences in cases:
        for biased in (False, True):
            case = make_case(size, sequences, biased, device)
            about = [f"{sequences}, d = {size.d}", "learned" if biased else "none"]
            for row in compared(case, kernels(device, biased)):
                yield [*about, *row]
