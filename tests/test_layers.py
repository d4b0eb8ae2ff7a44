"""The layers around attention: dropout, activations, and the weights that are shown of them."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from schemes import LENGTHS, D, N, block, context, scheme, shake

from recbole_pos.errors import UsageError
from recbole_pos.layers.attention import ACTIVATIONS, FeedForward, MultiHeadAttention
from recbole_pos.layers.hooks import AttentionPosition
from recbole_pos.position.compose import Compose

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("where", ["hidden_dropout", "attn_dropout"])
@pytest.mark.parametrize("name", [None, "alibi", "t5", "parec", "tisas", "token_mixing"])
def test_dropout_of_attention_in_training_alone(where: str, name: str | None) -> None:
    layer = MultiHeadAttention(
        block(**{where: 0.5}), scheme(name, 2) if name else AttentionPosition()
    )
    shake(layer)
    x = torch.randn(sum(LENGTHS), D)
    assert not torch.equal(layer(x, context()), layer(x, context()))
    layer.eval()
    assert torch.equal(layer(x, context()), layer(x, context()))


def test_dropout_of_the_feed_forward_layer_in_training_alone() -> None:
    layer, x = FeedForward(block(hidden_dropout=0.5)), torch.randn(5, D)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("names", [[], ["rope"], ["t5"]], ids=str)
@torch.no_grad()
def test_the_weights_that_are_shown_are_those_of_the_layer(names: list[str], norm: str) -> None:
    """Weights times values are what attention gives."""
    schemes = Compose({name: scheme(name, 2) for name in names})
    layer = MultiHeadAttention(block(norm=norm, output=False), schemes)
    shake(layer)
    layer.eval()
    ctx, x = context(), torch.randn(sum(LENGTHS), D)
    read = layer.LayerNorm(x) if norm == "pre" else x
    value = ctx.pad(layer.value(read).view(-1, 2, D // 2), "start").transpose(1, 2)
    out = ctx.unpad((layer.weights(x, ctx) @ value).transpose(1, 2), "start").reshape(x.shape)
    torch.testing.assert_close(out, layer.attention(read, ctx))


def test_activations() -> None:
    x = torch.linspace(-3, 3, 13)
    formulas = {
        "gelu": lambda z: z * (1 + math.erf(z / math.sqrt(2))) / 2,
        "relu": lambda z: max(z, 0.0),
        "swish": lambda z: z / (1 + math.exp(-z)),
        "tanh": math.tanh,
        "sigmoid": lambda z: 1 / (1 + math.exp(-z)),
    }
    assert formulas.keys() == ACTIVATIONS.keys()
    for name, formula in formulas.items():
        assert ACTIVATIONS[name](x).tolist() == pytest.approx([formula(z) for z in x.tolist()])


def test_a_sequence_that_is_too_long() -> None:
    with pytest.raises(ValueError, match="exceeds the maximum"):
        context([N + 1])


def test_cape_counts_every_dissimilar_event() -> None:
    """Gates of nearly one: the oldest key is just below t away."""
    position = scheme("cape", cape_positions=30)
    shake(position)
    q = torch.ones(5, 1, D)
    of_heads = [x.transpose(0, 1)[None] for x in (q, -q)]
    bias = position.bias(*of_heads, context([5]))[0, 0]
    want = reference.cape_bias(q[:, 0], -q[:, 0], position.weight.detach())
    for i in range(5):
        assert bias[i, : i + 1].tolist() == pytest.approx([float(w) for w in want[i]][: i + 1])


def test_a_hard_gate_of_one_half_is_order() -> None:
    assert scheme("to_rope", fusion="early", gate="hard", gate_value=0.5).time_share().item() == 0


def test_kerple_starts_between_its_heads() -> None:
    start = torch.nn.functional.softplus(scheme("kerple", 4).raw_r1).flatten()
    assert start.tolist() == pytest.approx([(head + 0.5) / 4 for head in range(4)])


def test_linear_attention_of_features_that_vanish() -> None:
    """elu + 1 is 0 in float32 below about -17."""
    from schemes import attend, qkv

    q, k, v = (x.float() for x in qkv(N))
    for one, other in ((q - 100, k), (q, k - 100)):
        assert attend(scheme("linear_attention"), one, other, v, context([N])).isfinite().all()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "to_rope",
            {"fusion": "effective", "learn_frequencies": "free", "gate_value": 1},
            "gate_value: must be above 0",
        ),
        ("time_rope", {"time_min_period": 0.0}, "time_min_period must be above 0"),
        ("time_rope", {"time_min_period": 5.0, "time_max_period": 5.0}, "below time_max_period"),
        ("kernel", {"kernel_band": 0}, "kernel_band"),
    ],
)
def test_what_schemes_refuse(name: str, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        scheme(name, **options)
