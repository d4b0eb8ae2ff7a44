"""Small position schemes, batches, layers and stacks, shared by the tests of schemes."""

from typing import Any

import reference
import torch
from torch import Tensor

from recbole_pos.layers.attention import Dropout, masked_attention
from recbole_pos.layers.forward import BlockOptions, MultiHeadAttention, TransformerEncoder
from recbole_pos.layers.gated_blocks import build_layer
from recbole_pos.layers.hooks import AttentionPosition, Dimensions, replaces_attention
from recbole_pos.layers.sequence_batch import SequenceBatch
from recbole_pos.position.build import Compose, build_schemes
from recbole_pos.position.schemes import SCHEMES

ATTENTION = [name for name, cls in SCHEMES.items() if issubclass(cls, AttentionPosition)]
REPLACING = [name for name in ATTENTION if replaces_attention(SCHEMES[name])]
N, D = 9, 8
LENGTHS = [4, 9, 1, 6]
ITEMS = 30
# attributes of items, [items, s], 0 for none
ATTRIBUTES = {"brand": torch.arange(ITEMS) % 4, "tags": torch.arange(3 * ITEMS) * 7 % 5}


def attribute(field: str) -> Tensor:
    return ATTRIBUTES[field].view(ITEMS, -1)


def defaults(*names: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        found |= SCHEMES.defaults(name)
    return found


def sizes(heads: int = 1, n: int = N, d: int = D, **more: Any) -> Dimensions:
    given = {"initializer_range": 1.0, "attribute": attribute, **more}
    return Dimensions(max_length=n, hidden_size=d, n_heads=heads, **given)


def build(cls: type, dimensions: Dimensions, options: dict[str, Any]) -> Any:
    return cls(dimensions, **{key: options[key] for key in cls.options})


def scheme(name: str, heads: int = 1, n: int = N, d: int = D, **options: Any) -> Any:
    return build(SCHEMES[name], sizes(heads, n, d), {**defaults(name), **options})


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
    lengths: list[int] = LENGTHS, n: int = N, times: Tensor | None = None, at: Tensor | None = None
) -> SequenceBatch:
    times = times_of(lengths) if times is None else times
    items = torch.arange(sum(lengths)) % ITEMS
    return SequenceBatch.from_lengths(items, torch.tensor(lengths), n, times=times, at=at)


def attend(
    position: AttentionPosition, q: Tensor, k: Tensor, v: Tensor, ctx: SequenceBatch | None = None
) -> Tensor:
    """[m, h, e] what attention gives before its output layer."""
    ctx = ctx or context()
    out = position.attend(q, k, v, ctx, Dropout(0.0))
    layer = MultiHeadAttention(block(n_heads=q.size(1)), position)
    if out is not None:
        return out
    block_out = masked_attention(*layer.apply_hooks(q, k, v, ctx), ctx, True, Dropout(0.0))
    return ctx.unpad(block_out.transpose(1, 2), "start")


def block(**changes: Any) -> BlockOptions:
    sizes = {"hidden_size": D, "inner_size": D, "n_heads": 2, "layer_norm_eps": 1e-8}
    dropout = {"hidden_dropout_prob": 0.0, "attn_dropout_prob": 0.0}
    given = {"hidden_act": "gelu", "norm": "pre", "bias": True, "output": True, **sizes, **dropout}
    return BlockOptions(**{**given, **changes})


def qkv(m: int, heads: int = 1, d: int = D) -> list[Tensor]:
    return [torch.randn(m, heads, d // heads) for _ in range(3)]


def rows_of(lengths: list[int]) -> list[slice]:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def shake(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.7 * torch.randn_like(parameter)


def composed(
    names: list[str], heads: int, n: int, d: int, options: dict[str, Any]
) -> tuple[Compose, dict[str, Any]]:
    """Schemes of attention with random parameters as one, and their options."""
    options = {**defaults(*names), **options}
    parts = {name: build(SCHEMES[name], sizes(heads, n, d), options) for name in names}
    position = Compose(parts)
    shake(position)
    return position, options


def heads_of(ctx: SequenceBatch, heads: int) -> list[tuple[slice, reference.Head]]:
    """What the reference reads of every sequence and head, and its rows."""
    found = []
    for number, rows in enumerate(rows_of(ctx.lengths.tolist())):
        times, items = ctx.times[rows].tolist(), ctx.items[rows].tolist()
        asked = times if ctx.at is None else [*times[1:], ctx.at[number].item()]
        for head in range(heads):
            read = reference.Head(ctx.max_length, heads, head, times, asked, items)
            found.append((rows, read))
    return found


class Stack(torch.nn.Module):
    """Input schemes and two blocks as ``PosSASRec`` stacks them, all parameters random."""

    def __init__(
        self, names: list[str], kind: str = "transformer", norm: str = "pre", **options: Any
    ) -> None:
        super().__init__()
        dimensions = sizes(heads=2, n_layers=2)
        options = {**defaults(*names), **options}
        schemes = build_schemes(names, dimensions, options, has_attention=True)
        self.needs_time, self.first = schemes.needs_time, schemes.input
        layers = (build_layer(kind, block(norm=norm), schemes.attention()) for _ in range(2))
        self.layers = TransformerEncoder(layers)
        shake(self)

    def forward(self, x: Tensor, ctx: SequenceBatch, positions: Tensor | None = None) -> Tensor:
        return self.layers(self.first(x, ctx), ctx, positions)
