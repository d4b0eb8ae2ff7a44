"""Schemes that fill places of dot-product attention: formulas, kernel, composition."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from test_positions import LENGTHS, D, N, _double, _rows, block, context, qkv, scheme
from torch import Tensor

from recbole_pos.errors import UsageError
from recbole_pos.layers import biased_attention, triangular
from recbole_pos.layers.attention import MultiHeadAttention, TransformerEncoder
from recbole_pos.layers.triangular import toeplitz_matrix, toeplitz_product, triangular_product
from recbole_pos.position.base import AttentionPosition, Compose, Dimensions
from recbole_pos.position.build import build_schemes, describe
from recbole_pos.position.kernel import FullFactor, ToeplitzFactor
from recbole_pos.properties import ROOT, plugin_defaults, read_yaml
from recbole_pos.registry import SCHEMES

__all__ = ["_double"]  # the fixture: float64 and a fixed seed
KINDS = ["toeplitz", "full", "identity"]


def shake(module: torch.nn.Module) -> None:
    """Random parameters instead of identity and zero."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.7 * torch.randn_like(parameter)


def run(position: AttentionPosition, q: Tensor, k: Tensor, v: Tensor, lengths=LENGTHS) -> Tensor:
    layer = MultiHeadAttention(block(n_heads=q.size(1)), position)
    return layer._dot_product(q, k, v, context(lengths))


def compare(position: AttentionPosition, want, heads: int = 1) -> None:
    """Every sequence and head of a batch against ``want(q, k, v, head)``."""
    q, k, v = qkv(sum(LENGTHS), heads)
    out = run(position, q, k, v)
    for rows in _rows(LENGTHS):
        for head in range(heads):
            expected = want(*(x[rows, head] for x in (q, k, v)), head)
            torch.testing.assert_close(out[rows, head], expected, rtol=1e-10, atol=1e-10)


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
    for rows, length in zip(_rows(LENGTHS), LENGTHS, strict=True):
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
        run(position, q, k, v).pow(2).sum().backward()
        for parameter in position.parameters():
            assert parameter.grad.isfinite().all() and (parameter.grad != 0).all()


@pytest.mark.parametrize("rows", [None, 2, 30])
@pytest.mark.parametrize("heads", [1, 2])
def test_cape(rows: int | None, heads: int) -> None:
    """With a table of its own length, a short one that clamps, and a long one."""
    position = scheme("cape", heads, cape_positions=rows)
    shake(position)

    def want(q, k, v, head):
        return reference.biased_attention(q, k, v, reference.cape_bias(q, k, position.weight.detach()))

    compare(position, want, heads)


@pytest.mark.parametrize("upper", KINDS)
@pytest.mark.parametrize("lower", KINDS)
@pytest.mark.parametrize("band", [None, 3])
def test_kernel_equals_equation_9(upper: str, lower: str, band: int | None) -> None:
    position = scheme("kernel", 2, kernel_u=upper, kernel_l=lower, kernel_band=band)
    shake(position)

    def dense(kind: str, factor) -> Tensor:
        """[n, n] lower-triangular, by loops over the parameters."""
        if kind == "identity":
            return torch.eye(N)
        out, at = torch.zeros(N, N), 0
        for i in range(N):
            for j in range(i + 1):
                if kind == "full":
                    out[i, j] = factor.weight[at]
                    at += 1
                elif i - j < len(factor.weight):
                    out[i, j] = factor.weight[i - j]
        return out

    u, low = dense(upper, position.U).T, dense(lower, position.L)

    def want(q, k, v, head):
        t = len(q)
        return reference.kernel_attention(q, k, v, u[-t:, -t:], low[-t:, -t:])

    compare(position, want, 2)


def test_moving_u_to_the_keys_changes_nothing() -> None:
    """(Q K^T) U = Q (U^T K)^T, and attention on (Q, U^T K, L V) is equation 9 with matrices."""
    position = scheme("kernel")
    shake(position)
    q, k, v = (x[:, 0] for x in qkv(N))
    u, low = position.U.matrix(N).T, position.L.matrix(N)
    torch.testing.assert_close((q @ k.T) @ u, q @ (u.T @ k).T)
    logits = (q @ k.T @ u) / math.sqrt(D)
    mask = torch.ones(N, N, dtype=torch.bool).triu(1)
    want = logits.masked_fill(mask, -torch.inf).softmax(-1) @ low @ v
    out = run(position, *(x[:, None] for x in (q, k, v)), lengths=[N])
    torch.testing.assert_close(out[:, 0], want)


def build(names: list[str], n: int, layers: int, **changes) -> torch.nn.Module:
    options = {}
    for name in names:
        options.update(read_yaml(ROOT / "position" / f"{name}.yaml"))
    dimensions = Dimensions(max_length=n, hidden_size=D, n_heads=1, initializer_range=1.0)
    schemes = build_schemes(names, dimensions, {**options, **changes})
    return TransformerEncoder(block(n_heads=1), layers, schemes.attention)


def added(encoder: torch.nn.Module) -> int:
    """Distinct parameters of the position schemes."""
    found = {
        p
        for layer in encoder.layer
        for p in layer.multi_head_attention.position.parameters()
        if p.requires_grad
    }
    return sum(p.numel() for p in found)


@pytest.mark.parametrize("layers", [1, 3])
def test_parameter_count_of_section_3_4(layers: int) -> None:
    """BK + K(K + 1)/2."""
    k = 11
    assert added(build(["kernel"], k, layers)) == layers * k + k * (k + 1) // 2
    assert describe("kernel", layers).parameters == layers * 50 + 50 * 51 // 2


@pytest.mark.parametrize(
    ("u_shared", "l_shared", "want"),
    [(False, False, 3 * 9 + 3 * 45), (True, False, 9 + 3 * 45), (True, True, 9 + 45)],
)
def test_factors_per_layer_or_shared(u_shared: bool, l_shared: bool, want: int) -> None:
    encoder = build(["kernel"], 9, 3, kernel_u_shared=u_shared, kernel_l_shared=l_shared)
    assert added(encoder) == want
    kernels = [layer.multi_head_attention.position.schemes["kernel"] for layer in encoder.layer]
    assert (kernels[0].U is kernels[2].U) == u_shared
    assert (kernels[1].L is kernels[2].L) == l_shared


def test_a_shared_factor_learns_from_every_layer_and_survives_saving() -> None:
    encoder, ctx = build(["kernel"], N, 2), context()
    x = torch.randn(sum(LENGTHS), D)
    kernels = [layer.multi_head_attention.position.schemes["kernel"] for layer in encoder.layer]
    encoder(x, ctx).pow(2).sum().backward()
    assert kernels[0].L.weight.grad.abs().sum() > 0
    shake(encoder)
    other = build(["kernel"], N, 2)
    other.load_state_dict(encoder.state_dict())
    torch.testing.assert_close(other(x, ctx), encoder(x, ctx))


@pytest.mark.parametrize("kind", ["toeplitz", "full"])
def test_a_fresh_kernel_model_equals_its_backbone(experiment, kind: str) -> None:
    """To the bit, in training and prediction, from the same seed."""
    torch.set_default_dtype(torch.float32)
    same = {"kernel_u": kind, "kernel_l": kind, "hidden_dropout_prob": 0.0}
    kernel = experiment("KernelAttention", **same)
    options = {
        key: plugin_defaults("KernelAttention")[key] for key in ("n_heads", "embedding_scale")
    }
    plain = experiment("PosSASRec", position=["nope"], hidden_dropout_prob=0.0, **options)
    batch = next(iter(kernel.trainer.training_loader(kernel.loaders["train"])))
    assert torch.equal(kernel.model.calculate_loss(batch), plain.model.calculate_loss(batch))
    rows = next(iter(kernel.loaders["test"]))[0]
    scores = [made.model.eval().full_sort_predict(rows) for made in (kernel, plain)]
    assert torch.equal(*scores)


def test_permutation_of_equation_7() -> None:
    """Without scheme and mask a permuted sequence gives permuted rows (eq. 4); the kernel does not.

    Y(X R, C) = R^T Y(X, R C R^T), which differs from R^T Y(X, C).
    """
    t = N
    x, w = torch.randn(t, D), torch.randn(D, D)
    r = torch.eye(t)[torch.randperm(t)]
    c = toeplitz_matrix(torch.rand(t), t).T @ torch.rand(t, t).tril()

    def y(x: Tensor, c: Tensor) -> Tensor:  # rows are positions: X R of the paper is r.T @ x
        return (x @ w @ x.T) @ c @ x

    permuted = y(r.T @ x, c)
    torch.testing.assert_close(permuted, r.T @ y(x, r @ c @ r.T))
    assert (permuted - r.T @ y(x, c)).abs().max() > 1e-3
    torch.testing.assert_close(y(r.T @ x, torch.eye(t)), r.T @ y(x, torch.eye(t)))


@pytest.mark.parametrize("names", [[], ["kernel"]], ids=str)
def test_order_reaches_the_last_output_only_through_a_scheme(names: list[str]) -> None:
    """The newest query sees its whole past: one layer without a scheme cannot tell its order."""
    encoder = build(names, N, 1)
    for layer in encoder.layer:
        shake(layer.multi_head_attention.position)
    x = torch.randn(N, D)
    order = torch.cat((torch.randperm(N - 1), torch.tensor([N - 1])))
    before, after = (encoder(x[o], context([N]))[-1] for o in (torch.arange(N), order))
    assert torch.allclose(before, after) == (not names)


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
    product = (position.rotate(q, ctx) @ position.rotate(k, ctx).permute(1, 2, 0).squeeze(0))[:, 0]
    for i in range(1, N):
        torch.testing.assert_close(product[i, 1:], product[i - 1, :-1])


def test_toeplitz_kernel_depends_on_distance_alone() -> None:
    """A sequence that starts later, after zeros, gives the same, later."""
    factor = ToeplitzFactor(N, None)
    shake(factor)
    x, shift = torch.randn(N - 2, 1, D), 2
    later = torch.cat((torch.zeros(shift, 1, D), x))
    torch.testing.assert_close(factor(later, context([N]))[shift:], factor(x, context([N - shift])))


def test_kernel_after_rope_mixes_rotated_keys() -> None:
    """The kernel multiplies the logits of the other scheme: (R Q)(R K)^T U, in either order."""
    position = scheme("kernel")
    shake(position)

    def want(q, k, v, head):
        t = len(q)
        q, k = (reference.rotate(x, 10000.0) for x in (q, k))
        matrices = position.U.matrix(t).T, position.L.matrix(t)
        return reference.kernel_attention(q, k, v, *matrices)

    rope = scheme("rope")
    compare(Compose({"rope": rope, "kernel": position}), want)
    compare(Compose({"kernel": position, "rope": rope}), want)


def test_biases_add_up() -> None:
    alibi, t5 = scheme("alibi"), scheme("t5")
    shake(t5)
    q = torch.randn(2, 1, N, D)
    both = Compose({"alibi": alibi, "t5": t5}).bias(q, q, context([N, N]))
    torch.testing.assert_close(both, sum(s.bias(q, q, context([N, N])) for s in (alibi, t5)))


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
    monkeypatch.setitem(biased_attention.CHUNK_ELEMENTS, "cpu", 2 * heads * t * t)
    with torch.profiler.profile(profile_memory=True) as profile:
        got = torch.autograd.grad((layer._dot_product(*inputs, ctx) * g).sum(), wanted)
    for a, b_ in zip(got, want, strict=True):
        torch.testing.assert_close(a, b_)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < largest < b * heads * t * t * 8 / 2


def test_kernel_gradient() -> None:
    """Numerical gradients of both factors, the values and the keys."""
    position = scheme("kernel", n=5, kernel_band=3)
    shake(position)
    q, k, v = (x.requires_grad_() for x in qkv(8))

    def out(u: Tensor, low: Tensor, k: Tensor, v: Tensor) -> Tensor:
        position.U.weight = None
        position.L.weight = None
        position.U.weight, position.L.weight = u, low
        ctx = context([5, 3], 5)
        keys, values = position.mix_keys(k, ctx), position.mix_values(v, ctx)
        return torch.cat((keys, values))

    parameters = [p.detach().clone().requires_grad_() for p in position.parameters()]
    for factor in (position.U, position.L):
        del factor.weight
    assert torch.autograd.gradcheck(out, (*parameters, k, v))


@pytest.mark.parametrize(("t", "band"), [(1, 1), (5, 5), (5, 2), (150, 150), (200, 70), (131, 1)])
def test_triangular_product(t: int, band: int) -> None:
    """Across several blocks, with a band and without."""
    weight = torch.randn(band, requires_grad=True)
    x, g = torch.randn(t, 3, requires_grad=True), torch.randn(t, 3)
    matrix = toeplitz_matrix(weight, t)
    for i in range(0, t, 7):
        for j in range(t):
            assert matrix[i, j] == (weight[i - j] if 0 <= i - j < band else 0)
    out = triangular_product(matrix, x, band)
    torch.testing.assert_close(out, matrix @ x)
    got = torch.autograd.grad((out * g).sum(), (weight, x))
    want = torch.autograd.grad(((toeplitz_matrix(weight, t) @ x) * g).sum(), (weight, x))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("t", [33, 64, 101])
def test_long_toeplitz_products_by_fft(monkeypatch, t: int) -> None:
    """Equal to the matrix, and still with exactly nothing from the future."""
    monkeypatch.setattr(triangular, "FFT_LENGTH", 8)
    weight, x = torch.randn(t, requires_grad=True), torch.randn(t, 2, requires_grad=True)
    out, g = toeplitz_product(weight, x), torch.randn(t, 2)
    want = toeplitz_matrix(weight, t) @ x
    torch.testing.assert_close(out, want)
    for a, b in zip(
        torch.autograd.grad((out * g).sum(), (weight, x), retain_graph=True),
        torch.autograd.grad((want * g).sum(), (weight, x)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    for i in range(0, t - 1, 5):
        (grad,) = torch.autograd.grad(out[i].sum(), x, retain_graph=True)
        assert (grad[i + 1 :] == 0).all()
    changed = x.detach().clone()
    changed[20:] += 1e6
    assert torch.equal(toeplitz_product(weight, changed)[:20], out[:20])


def test_full_factor_takes_the_newest_rows() -> None:
    factor = FullFactor(N)
    shake(factor)
    whole = factor.matrix(N)
    assert torch.equal(whole, whole.tril())
    assert torch.equal(whole[tuple(torch.tril_indices(N, N))], factor.weight)
    for t in range(1, N):
        assert torch.equal(factor.matrix(t), whole[-t:, -t:])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("kernel", {"kernel_u": "banded"}, "kernel_u"),
        ("kernel", {"kernel_band": N + 1}, "kernel_band"),
        ("kerple", {"kerple_kind": "cubic"}, "kerple_kind"),
        ("t5", {"t5_buckets": 32, "t5_max_distance": 16}, "t5_max_distance"),
        ("sinusoidal", {"position_from": "middle"}, "position_from"),
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
