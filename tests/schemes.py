"""Small position schemes, batches and layers, shared by the tests of schemes."""

from __future__ import annotations

import torch
from torch import Tensor

from recbole_pos.layers.attention import BlockOptions, MultiHeadAttention
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.dropout import Dropout
from recbole_pos.layers.hooks import AttentionPosition, Dimensions
from recbole_pos.position.schemes import SCHEMES
from recbole_pos.yaml_files import ROOT, read_yaml

N, D = 9, 8
LENGTHS = [4, 9, 1, 6]


def scheme(name: str, heads: int = 1, n: int = N, d: int = D, **options):
    """A scheme with the defaults of its yaml."""
    defaults = read_yaml(ROOT / "position" / f"{name}.yaml")
    dimensions = Dimensions(max_length=n, hidden_size=d, n_heads=heads, initializer_range=1.0)
    return SCHEMES[name](dimensions, **{**defaults, **options})


def times_of(lengths: list[int]) -> Tensor:
    """Irregular times with ties, oldest first; those of a sequence follow from its length alone."""

    def one(length: int) -> Tensor:
        draw = torch.rand(2, length, dtype=torch.float64, generator=generator.manual_seed(length))
        gap = (16 * draw[0]).exp()  # a second to three months
        gap[2::4] = 0
        return 1.5e9 + 1e6 * draw[1, 0] + gap.cumsum(0)

    generator = torch.Generator()
    return torch.cat([one(length) for length in lengths])


def context(
    lengths: list[int] = LENGTHS, n: int = N, times: Tensor | None = None
) -> SequenceContext:
    times = times_of(lengths) if times is None else times
    return SequenceContext.from_lengths(torch.tensor(lengths), n, times)


def attend(position: AttentionPosition, q: Tensor, k: Tensor, v: Tensor, ctx: SequenceContext):
    return position.attend(q, k, v, ctx, Dropout(0.0))


def block(**changes) -> BlockOptions:
    given = {
        "hidden_size": D,
        "inner_size": D,
        "n_heads": 2,
        "hidden_dropout": 0.0,
        "attn_dropout": 0.0,
        "activation": "gelu",
        "norm": "pre",
        "bias": True,
        "output": True,
        "layer_norm_eps": 1e-8,
    }
    return BlockOptions(**{**given, **changes})


def qkv(m: int, heads: int = 1, d: int = D) -> list[Tensor]:
    return [torch.randn(m, heads, d // heads) for _ in range(3)]


def rows_of(lengths: list[int]) -> list[slice]:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def shake(module: torch.nn.Module) -> None:
    """Random parameters instead of identity and zero."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.7 * torch.randn_like(parameter)


def dot_product(
    position: AttentionPosition,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int] = LENGTHS,
    ctx: SequenceContext | None = None,
) -> Tensor:
    layer = MultiHeadAttention(block(n_heads=q.size(1)), position)
    return layer._dot_product(q, k, v, ctx or context(lengths))


def compare(position: AttentionPosition, want, heads: int = 1) -> None:
    """Every sequence and head of a batch against ``want(q, k, v, head)``."""
    q, k, v = qkv(sum(LENGTHS), heads)
    out = dot_product(position, q, k, v)
    for rows in rows_of(LENGTHS):
        for head in range(heads):
            expected = want(*(x[rows, head] for x in (q, k, v)), head)
            torch.testing.assert_close(out[rows, head], expected, rtol=1e-10, atol=1e-10)
