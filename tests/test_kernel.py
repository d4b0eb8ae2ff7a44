"""The positional kernel: equation 9, its factors, and fast products with them."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from schemes import LENGTHS, D, N, block, compare, context, dot_product, qkv, scheme, shake
from torch import Tensor

from recbole_pos.config.defaults import plugin_defaults
from recbole_pos.layers import triangular
from recbole_pos.layers.attention import TransformerEncoder
from recbole_pos.layers.hooks import Dimensions
from recbole_pos.layers.triangular import toeplitz_matrix, toeplitz_product, triangular_product
from recbole_pos.position.build import build_schemes, describe
from recbole_pos.position.compose import Compose
from recbole_pos.position.kernel import FullFactor, ToeplitzFactor
from recbole_pos.yaml_files import ROOT, read_yaml

pytestmark = pytest.mark.usefixtures("double")
KINDS = ["toeplitz", "full", "identity"]


def build(names: list[str], n: int, layers: int, **changes) -> torch.nn.Module:
    options = {}
    for name in names:
        options.update(read_yaml(ROOT / "position" / f"{name}.yaml"))
    dimensions = Dimensions(max_length=n, hidden_size=D, n_heads=1, initializer_range=1.0)
    schemes = build_schemes(names, dimensions, {**options, **changes})
    return TransformerEncoder(block(n_heads=1), layers, schemes.attention)


@pytest.mark.parametrize("upper", KINDS)
@pytest.mark.parametrize("lower", KINDS)
@pytest.mark.parametrize("band", [None, 3])
def test_kernel_equals_equation_9(upper: str, lower: str, band: int | None) -> None:
    """In batches shorter than the factors, of which they meet the last rows and columns."""
    n = N + 3
    if "toeplitz" not in (upper, lower):
        band = None  # which only a Toeplitz factor has
    position = scheme("kernel", 2, n, kernel_u=upper, kernel_l=lower, kernel_band=band)
    shake(position)

    def dense(kind: str, factor) -> Tensor:
        """[n, n] lower-triangular, by loops over the parameters."""
        if kind == "identity":
            return torch.eye(n)
        out, at = torch.zeros(n, n), 0
        for i in range(n):
            for j in range(i + 1):
                if kind == "full":
                    out[i, j] = factor.weight[at]
                    at += 1
                elif i - j < len(factor.weight):
                    out[i, j] = factor.weight[i - j]
        return out

    u, low = dense(upper, position.U).T.detach(), dense(lower, position.L).detach()

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
    out = dot_product(position, *(x[:, None] for x in (q, k, v)), lengths=[N])
    torch.testing.assert_close(out[:, 0], want)


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
    assert torch.equal(kernel.model.window_loss(batch), plain.model.window_loss(batch))
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


@pytest.mark.parametrize("other", ["alibi", "t5", "kerple", "cape"])
@pytest.mark.parametrize("turned", [False, True])
def test_kernel_with_a_bias(other: str, turned: bool) -> None:
    """Q K^T U / sqrt(d) + B: the kernel multiplies no bias, but CAPE's gates see U^T K for K.

    Where Q and K are turned as well, both see them turned.
    """
    position, biased = scheme("kernel", 2), scheme(other, 2)
    shake(position)
    shake(biased)

    def want(q, k, v, head):
        t = len(q)
        if turned:
            q, k = (reference.rotate(x, 10000.0) for x in (q, k))
        keys, values = position.U.matrix(t) @ k, position.L.matrix(t) @ v  # U^T K, L V
        if other == "cape":
            bias = reference.cape_bias(q, keys, biased.weight.detach())
        else:
            bias = biased.bias(q[None, None], k[None, None], context([t])).expand(1, 2, t, t)
            bias = bias[0, head].tolist()
        return reference.biased_attention(q, keys, values, bias)

    rope = {"rope": scheme("rope", 2)} if turned else {}
    compare(Compose({other: biased, **rope, "kernel": position}), want, 2)
    compare(Compose({"kernel": position, other: biased, **rope}), want, 2)


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


def test_full_factor_takes_the_newestrows_of() -> None:
    factor = FullFactor(N)
    shake(factor)
    whole = factor.matrix(N)
    assert torch.equal(whole, whole.tril())
    assert torch.equal(whole[tuple(torch.tril_indices(N, N))], factor.weight)
    for t in range(1, N):
        assert torch.equal(factor.matrix(t), whole[-t:, -t:])
