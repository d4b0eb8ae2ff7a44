"""Schemes that fill places of dot-product attention: formulas, kernel, composition."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from schemes import LENGTHS, D, N, block, compare, context, dot_product, qkv, rows_of, scheme, shake
from torch import Tensor

from recbole_pos.errors import UsageError
from recbole_pos.layers import chunks
from recbole_pos.layers.attention import MultiHeadAttention
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.hooks import AttentionPosition, Dimensions
from recbole_pos.position.compose import Compose
from recbole_pos.position.schemes import SCHEMES

pytestmark = pytest.mark.usefixtures("double")


def test_sinusoidal_positions() -> None:
    """Vaswani et al., section 3.5, for odd sizes too; the newest event has row n - 1."""
    dimensions = Dimensions(max_length=N, hidden_size=7, n_heads=1, initializer_range=1.0)
    table = SCHEMES["sinusoidal"](dimensions, position_from="oldest").weight
    for p in range(N):
        for column in range(7):
            angle = p / 10000 ** (2 * (column // 2) / 7)
            want = math.sin(angle) if column % 2 == 0 else math.cos(angle)
            assert table[p, column].item() == pytest.approx(want, abs=1e-12)
    position, x = scheme("sinusoidal"), torch.randn(sum(LENGTHS), D)
    out = position(x, context())
    for rows, length in zip(rows_of(LENGTHS), LENGTHS, strict=True):
        torch.testing.assert_close(out[rows] - x[rows], position.weight[N - length :])


@pytest.mark.parametrize("heads", [1, 2])
def test_rope(heads: int) -> None:
    def want(q, k, v, head):
        q, k = (reference.rotate(x, 100.0) for x in (q, k))
        return reference.dot_product_attention(q, k, v)

    compare(scheme("rope", heads, rope_base=100.0), want, heads)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_alibi(heads: int) -> None:
    def want(q, k, v, head):
        slope = reference.alibi_slope(head, heads)
        bias = [[-slope * (i - j) for j in range(len(q))] for i in range(len(q))]
        return reference.biased_attention(q, k, v, bias)

    compare(scheme("alibi", heads), want, heads)


def test_alibi_slopes_for_six_heads() -> None:
    dimensions = Dimensions(max_length=N, hidden_size=12, n_heads=6, initializer_range=1.0)
    slopes = SCHEMES["alibi"](dimensions).slopes.flatten().tolist()
    assert slopes == pytest.approx([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])
    assert slopes == pytest.approx([reference.alibi_slope(h, 6) for h in range(6)])


@pytest.mark.parametrize("heads", [1, 2])
def test_t5(heads: int) -> None:
    position = scheme("t5", heads, t5_buckets=6, t5_max_distance=7)
    shake(position)

    def want(q, k, v, head):
        table = position.weight[head].tolist()
        bias = [
            [table[reference.t5_bucket(max(i - j, 0), 6, 7)] for j in range(len(q))]
            for i in range(len(q))
        ]
        return reference.biased_attention(q, k, v, bias)

    compare(position, want, heads)


def test_t5_buckets_of_the_defaults() -> None:
    position = scheme("t5", n=300)
    assert position.bucket.tolist() == [reference.t5_bucket(d, 32, 128) for d in range(300)]
    assert position.bucket[128:].unique().tolist() == [31]


@pytest.mark.parametrize("kind", ["log", "power"])
def test_kerple(kind: str) -> None:
    heads = 2
    position = scheme("kerple", heads, kerple_kind=kind)
    shake(position)

    def want(q, k, v, head):
        r1 = math.log1p(math.exp(position.raw_r1[head].item()))
        raw = position.raw_r2[head].item()
        r2 = math.log1p(math.exp(raw)) if kind == "log" else 2 / (1 + math.exp(-raw))

        def fall(x: int) -> float:
            return -r1 * (math.log(1 + r2 * x) if kind == "log" else x**r2)

        bias = [[fall(max(i - j, 0)) for j in range(len(q))] for i in range(len(q))]
        return reference.biased_attention(q, k, v, bias)

    compare(position, want, heads)


def test_kerple_starts_in_range_with_finite_gradients() -> None:
    for kind in ("log", "power"):
        position = scheme("kerple", 2, kerple_kind=kind)
        q, k, v = qkv(sum(LENGTHS), 2)
        dot_product(position, q, k, v).pow(2).sum().backward()
        for parameter in position.parameters():
            assert parameter.grad.isfinite().all() and (parameter.grad != 0).all()


@pytest.mark.parametrize("rows", [None, 2, 30])
@pytest.mark.parametrize("heads", [1, 2])
def test_cape(rows: int | None, heads: int) -> None:
    """With a table of its own length, a short one that clamps, and a long one."""
    position = scheme("cape", heads, cape_positions=rows)
    shake(position)

    def want(q, k, v, head):
        return reference.biased_attention(
            q, k, v, reference.cape_bias(q, k, position.weight.detach())
        )

    compare(position, want, heads)


def test_bias_depends_on_distance_alone() -> None:
    for name in ("alibi", "t5", "kerple"):
        position = scheme(name, 2)
        shake(position)
        q = torch.randn(1, 2, N, D // 2)
        bias = position.bias(q, q, context([N]))[0]
        for i in range(1, N):
            for j in range(1, i + 1):
                assert torch.equal(bias[:, i, j], bias[:, i - 1, j - 1])


def test_rope_depends_on_distance_alone() -> None:
    position, ctx = scheme("rope"), context([N])
    q, k = (torch.randn(1, 1, D).expand(N, 1, D) for _ in range(2))
    q, k = position.rotate(q, k, ctx)
    product = (q @ k.permute(1, 2, 0).squeeze(0))[:, 0]
    for i in range(1, N):
        torch.testing.assert_close(product[i, 1:], product[i - 1, :-1])


def test_biases_add_up() -> None:
    alibi, t5 = scheme("alibi"), scheme("t5")
    shake(t5)
    q = torch.randn(2, 1, N, D)
    both = Compose({"alibi": alibi, "t5": t5}).bias(q, q, context([N, N]))
    torch.testing.assert_close(both, sum(s.bias(q, q, context([N, N])) for s in (alibi, t5)))


class _PlainBias(AttentionPosition):
    """A learned bias of a given shape, as a scheme of a user's own may have."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(shape))

    def bias(self, q: Tensor, k: Tensor, ctx: SequenceContext) -> Tensor:
        return self.weight


@pytest.mark.parametrize("shape", [(5, 5), (1, 5, 5), (1, 1, 5, 5), (2, 1, 5), (1, 2, 5, 5)])
def test_learned_biases_of_any_shape(monkeypatch, shape: tuple[int, ...]) -> None:
    """Whatever is broadcastable to [b, h, t, t], in one chunk and in several."""
    layer, ctx = MultiHeadAttention(block(), Compose({"own": _PlainBias(*shape)})), context([5] * 8)
    inputs = qkv(40, 2)
    found = []
    for elements in (2**20, 1):
        monkeypatch.setitem(chunks.CHUNK_ELEMENTS, "cpu", elements)
        out = layer._dot_product(*inputs, ctx)
        found.append((out, torch.autograd.grad(out.pow(2).sum(), layer.position.parameters())))
    torch.testing.assert_close(*found)


def test_rotated_keys_with_a_learned_bias_in_half_precision(monkeypatch) -> None:
    monkeypatch.setitem(chunks.CHUNK_ELEMENTS, "cpu", 1)
    torch.set_default_dtype(torch.float32)
    layer = MultiHeadAttention(block(), Compose({n: scheme(n, 2) for n in ("rope", "t5")}))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(torch.randn(sum(LENGTHS), D), context()).float().pow(2).sum().backward()
    assert layer.position.schemes["t5"].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["rope", "alibi", "t5", "kerple", "cape", "kernel"])
def test_half_precision_comes_close(name: str) -> None:
    """Under autocast, as ``enable_amp`` trains."""
    torch.set_default_dtype(torch.float32)
    position = Compose({name: scheme(name, 2)})
    shake(position)
    layer = MultiHeadAttention(block(), position)
    x = torch.randn(sum(LENGTHS), D)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = layer(x, context())
        half.float().sum().backward()
    torch.testing.assert_close(half.float(), layer(x, context()), rtol=0.05, atol=0.05)
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("name", ["t5", "kerple"])
def test_a_learned_bias_needs_no_tensor_of_batch_times_pairs(monkeypatch, name: str) -> None:
    """In chunks: the same output and gradients, and nothing of size [b, h, t, t]."""
    b, t, heads = 16, 40, 2
    position = scheme(name, heads, n=t)
    shake(position)
    layer = MultiHeadAttention(block(), position)
    inputs = [x.requires_grad_() for x in qkv(b * t, heads)]
    ctx, g = context([t] * b, t), torch.randn(b * t, heads, D // heads)
    wanted = [*inputs, *position.parameters()]
    want = torch.autograd.grad((layer._dot_product(*inputs, ctx) * g).sum(), wanted)
    monkeypatch.setitem(chunks.CHUNK_ELEMENTS, "cpu", 2 * heads * t * t)  # two sequences
    with torch.profiler.profile(profile_memory=True) as profile:
        got = torch.autograd.grad((layer._dot_product(*inputs, ctx) * g).sum(), wanted)
    for a, b_ in zip(got, want, strict=True):
        torch.testing.assert_close(a, b_)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < largest < b * heads * t * t * 8 / 2


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("kernel", {"kernel_band": N + 1}, "kernel_band"),
        ("kernel", {"kernel_band": 2, "kernel_u": "full"}, "neither"),
        ("t5", {"t5_buckets": 32, "t5_max_distance": 16}, "t5_max_distance"),
    ],
)
def test_bad_options(name: str, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        scheme(name, **options)


def test_rope_needs_even_heads() -> None:
    dimensions = Dimensions(max_length=N, hidden_size=9, n_heads=3, initializer_range=1.0)
    with pytest.raises(UsageError, match="even size"):
        SCHEMES["rope"](dimensions, rope_base=10000.0)


@pytest.mark.parametrize("name", list(SCHEMES))
def test_every_scheme_runs_from_its_yaml(experiment, name: str) -> None:
    """Named in a configuration: trains, and one history scores alike alone and in a batch."""
    torch.set_default_dtype(torch.float32)
    made = experiment("PosSASRec", position=[name], n_heads=2)
    loader = made.trainer.training_loader(made.loaders["train"])
    losses = [made.trainer._train_epoch(loader, epoch)["loss"] for epoch in range(3)]
    assert losses[2] < losses[0]
    rows = next(iter(made.loaders["test"]))[0]
    model = made.model.eval()
    with torch.inference_mode():
        together = model.full_sort_predict(rows)
        torch.testing.assert_close(model.full_sort_predict(rows[3:4])[0], together[3])


@pytest.mark.parametrize("name", ["learned", "rope", "fparec", "hstu", "time_learned"])
def test_histories_are_scored_in_parts_of_alike_length(experiment, monkeypatch, name: str) -> None:
    """Where most of a batch would be padding: the same states in the same order."""
    made = experiment("PosSASRec", position=[name], n_heads=2)
    model, rows = made.model.double().eval(), next(iter(made.loaders["test"]))[0]
    lengths = rows[model.ITEM_SEQ_LEN]
    longest = int(lengths.argmax())
    short = (lengths < 4).nonzero()[:, 0].repeat(6)
    order = torch.cat((short, torch.tensor([longest]), short.flip(0)))
    rows = rows[order]
    times = rows[model.TIME_SEQ] if model.needs_time else None
    given = rows[model.ITEM_SEQ], rows[model.ITEM_SEQ_LEN], times
    expected, widths, forward = model(*given), [], model.forward

    def watched(items: Tensor, lengths: Tensor, times: Tensor | None) -> Tensor:
        widths.append(items.size(1))
        return forward(items, lengths, times)

    monkeypatch.setattr(model, "forward", watched)
    torch.testing.assert_close(model.states_of(rows), expected, rtol=1e-12, atol=1e-12)
    assert len(widths) > 2 and widths == sorted(widths) and widths[0] < 4 < widths[-1]
