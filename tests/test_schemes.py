"""Position schemes: each against its equation in plain loops, and what all of them must keep."""

import itertools
import math
from typing import Any

import pytest
import reference
import torch
from schemes import (
    ATTENTION,
    LENGTHS,
    D,
    N,
    Stack,
    attend,
    composed,
    context,
    defaults,
    heads_of,
    qkv,
    rows_of,
    scheme,
    shake,
    sizes,
    times_of,
)

from recbole_pos.errors import UsageError
from recbole_pos.layers import large_products
from recbole_pos.layers.attention import Dropout
from recbole_pos.layers.hooks import AttentionPosition, InputPosition
from recbole_pos.layers.sequence_batch import PaddedBatch, SequenceBatch
from recbole_pos.position import linear_attention, time_intervals
from recbole_pos.position.build import Compose, ComposeInput, build_schemes
from recbole_pos.position.schemes import SCHEMES

pytestmark = pytest.mark.usefixtures("double")
YEARS = 10 * 365.25 * 86400
EARLY = {"fusion": "early", "gate_value": 0.3}
GATED = {"fusion": "early", "gate": "sigmoid", "gate_scope": "head"}

# names, options, heads of what fills places of attention; inputs are in test_encodings.py
EQUATIONS: list[tuple[list[str], dict[str, Any], int]] = [
    (["nope"], {}, 2),
    (["rope"], {"rope_base": 100.0}, 1),
    (["alibi"], {}, 6),
    (["t5"], {"t5_buckets": 6, "t5_max_distance": 7}, 2),
    *((["kerple"], {"kerple_kind": kind}, 2) for kind in ("log", "power")),
    *((["cape"], {"cape_positions": rows}, 2) for rows in (None, 2, 30)),
    *((["hstu"], {"hstu_time_buckets": buckets}, 2) for buckets in (5, 128)),
    *((["time_decay"], {"decay_kind": kind}, 2) for kind in ("exponential_power", "power")),
    (["difsr"], {"difsr_fields": ["brand", "tags"], "difsr_size": 6}, 2),
    (["kernel"], {}, 2),
    (["kernel"], {"kernel_u": "toeplitz", "kernel_l": "full", "kernel_band": 3}, 2),
    (["kernel"], {"kernel_u": "full", "kernel_l": "identity"}, 1),
    (["kernel"], {"kernel_u": "identity", "kernel_l": "toeplitz"}, 2),
    (["time_rope"], {}, 2),
    (["time_rope"], {"learn_frequencies": "free", "time_base": 50.0, "time_scale": 0.7}, 1),
    (["calendar_rope"], {"calendar_parts": ["day", "week"]}, 1),
    (["rote"], {"rote_bases": [50.0, 20.0, 7.0]}, 2),
    (["to_rope"], {"fusion": "early", "gate_value": 0.3, "time_base": 50.0}, 2),
    (["to_rope"], {**GATED, "gate_scope": "global", "learn_frequencies": "ladder"}, 2),
    (["to_rope"], {**GATED, "gate_scope": "plane", "learn_scales": True}, 1),
    (["to_rope"], {**GATED, "gate": "hard", "gate_value": 0.6}, 2),
    (["to_rope"], {"fusion": "split_dim", "time_ratio": 0.25, "rope_scale": 0.6}, 2),
    (["to_rope"], {"fusion": "split_dim", "learn_frequencies": "free", "learn_scales": True}, 2),
    (["to_rope"], {"fusion": "split_head", "learn_frequencies": "ladder", "time_ratio": 0.25}, 4),
    (["to_rope"], {"fusion": "effective", "learn_frequencies": "ladder", "gate_value": 0.4}, 2),
    *((["tisas"], {"tisas_intervals": longest}, 2) for longest in (3, 1000)),
    *((["fuxi_linear"], {"fuxi_position_size": 6, "channel_share": x}, 2) for x in (0.25, 0.4)),
    *((["parec"], {"positional_mask": f"{when}_softmax"}, 2) for when in ("before", "after")),
    (["fparec"], {"positional_mask": "after_softmax"}, 2),
    *(([name], {}, 2) for name in ("average", "linear_annealing", "exponential_annealing")),
    (["linear_attention"], {}, 2),
    (["token_mixing"], {}, 2),
    (["kernel", "alibi", "t5", "rope"], {}, 2),
    (["cape", "kernel", "hstu", "time_rope"], {}, 2),
]
# stacks of two blocks: every scheme by itself, and combinations over blocks, norms and options
STACKS: list[tuple[list[str], str, dict[str, Any]]] = [
    *(([name], "transformer", {}) for name in SCHEMES),
    ([], "transformer", {"norm": "post"}),
    (["learned", "fparec"], "ligr", {}),
    (["sinusoidal", "rope", "t5", "kernel"], "transformer", {"norm": "post"}),
    (["cape", "kernel"], "hstu", {"kernel_u": "full"}),
    (["time_learned", "hstu", "rope"], "hstu", {"time_from": "previous"}),
    (["to_rope"], "ligr", {**GATED, "learn_frequencies": "ladder"}),
    (["to_rope"], "hstu", {"fusion": "split_layer"}),
    ([], "hstu", {}),
]
# of one state a history, whose interactions may read its time
CAUSAL = [s for s in STACKS if not any(SCHEMES[name].reads_newest_time for name in s[0])]
TIMED = [s for s in STACKS if any(SCHEMES[name].needs_time for name in s[0])]


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over the past run through several chunks, of which the last is not full."""
    monkeypatch.setattr(linear_attention, "CHUNK", 4)
    monkeypatch.setattr(linear_attention, "TIME_CHUNK", 2)


def assert_equals_reference(
    position: Compose, options: dict, given: list[torch.Tensor], ctx: SequenceBatch
) -> None:
    """What attention gives for q, k and v equals the plain loops, head by head."""
    out = attend(position, *given, ctx)
    for rows, head in heads_of(ctx, out.size(1)):
        parts = (x[rows, head.head] for x in given)
        want = reference.attention(position.parts(), options, *parts, head)
        torch.testing.assert_close(out[rows, head.head], want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("names", "options", "heads"), EQUATIONS, ids=str)
@torch.no_grad()
def test_attention_equals_its_equation(names: list[str], options: dict, heads: int) -> None:
    """In batches shorter than the tables; of time, at that of the event and of the request.

    And where times fall, as they may in given parts, unless the scheme says that it needs order.
    """
    d, n = 16, N + 3
    position, options = composed(names, heads, n, d, options)
    given = qkv(sum(LENGTHS), heads, d)
    last = times_of(LENGTHS)[torch.tensor(LENGTHS).cumsum(0) - 1]
    asked = [None, last + 5e5] if any(SCHEMES[name].reads_request for name in names) else [None]
    for at in asked:
        assert_equals_reference(position, options, given, context(n=n, at=at))
    if not any(SCHEMES[name].assumes_order for name in names):
        falling = context(n=n, times=times_of(LENGTHS).flip(0))
        assert_equals_reference(position, options, given, falling)


def test_every_scheme_has_an_equation() -> None:
    """A new scheme needs its transcription in reference.py and a row above."""
    assert {name for names, *_ in EQUATIONS for name in names} == set(ATTENTION)


@pytest.mark.parametrize(("names", "kind", "options"), CAUSAL, ids=str)
def test_nothing_comes_from_the_future(names: list[str], kind: str, options: dict) -> None:
    """Exactly zero gradient to later inputs and other sequences; no later value or time matters."""
    model, ctx = Stack(names, kind, **options), context()
    x = torch.randn(sum(LENGTHS), D, requires_grad=True)
    out = model(x, ctx)
    with torch.no_grad():
        known, weight = model(x, ctx), torch.randn_like(out)
    newest = LENGTHS[0] + LENGTHS[1] - 1  # of the longest sequence
    (grad,) = torch.autograd.grad((out * weight)[newest].sum(), x, retain_graph=True)
    own = ctx.row == 1
    assert (grad[own] != 0).any(-1).all() and (grad[~own] == 0).all()
    for cut in (1, 4, 6):
        before = ctx.index < cut
        (grad,) = torch.autograd.grad((out * weight)[before].sum(), x, retain_graph=True)
        assert (grad[~before] == 0).all()
        with torch.no_grad():
            moved = torch.where(before, ctx.times, ctx.times + 1e5 + 7e3 * ctx.index**2)
            other = torch.where(before[:, None], x, torch.randn_like(x))
            assert torch.equal(model(other, context(times=moved))[before], known[before])
            changed = model(x, context(times=moved))
            assert torch.equal(changed[before], known[before])
            same = torch.isclose(changed[~before], known[~before]).all()
            assert not same if model.needs_time else same


@pytest.mark.parametrize(("names", "kind", "options"), STACKS, ids=str)
@torch.no_grad()
def test_a_sequence_is_as_alone_and_padded(names: list[str], kind: str, options: dict) -> None:
    """And where the last block is requested some positions only."""
    model, ctx, x = Stack(names, kind, **options), context(), torch.randn(sum(LENGTHS), D)
    together = model(x, ctx)
    kept = torch.tensor([3, 0, 19])
    torch.testing.assert_close(model(x, ctx, kept), together[kept])
    for rows in rows_of(LENGTHS):
        length = torch.tensor([rows.stop - rows.start])
        alone = SequenceBatch.from_lengths(ctx.items[rows], length, N, times=ctx.times[rows])
        torch.testing.assert_close(model(x[rows], alone), together[rows], rtol=1e-9, atol=1e-9)
    real = torch.arange(N) < ctx.lengths[:, None]
    items, times = torch.zeros(real.shape, dtype=torch.long), torch.zeros(real.shape)
    filled = torch.randn(*real.shape, D)  # padding is anything
    items[real], times[real], filled[real] = ctx.items, ctx.times, x
    padded = PaddedBatch.from_rows(items, ctx.lengths, N, times)
    out = model(filled.view(-1, D), padded)[real.view(-1)]
    torch.testing.assert_close(out, together, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("names", "kind", "options"), TIMED, ids=str)
@torch.no_grad()
def test_differences_of_times_count(names: list[str], kind: str, options: dict) -> None:
    """In float32 ten years more change nothing; far apart, seconds still count as in float64."""
    model, x = Stack(names, kind, **options).float().double(), torch.randn(sum(LENGTHS), D)
    far = 1.2e9 + torch.tensor([0.0, *(3 * YEARS + s for s in (0, 1, 4, 60, 61, 62, 500, 501))])
    far = torch.cat([far[:length] for length in LENGTHS])
    exact = model(x, context(times=far))
    torch.set_default_dtype(torch.float32)
    model, x = model.float(), x.float()
    before = model(x, context())
    if "rote" not in names:  # which reads the calendar
        after = model(x, context(times=times_of(LENGTHS) + YEARS))
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    found = model(x, context(times=far))
    torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("names", "kind", "options"), STACKS, ids=str)
def test_half_precision_is_close_and_all_learns(names: list[str], kind: str, options: dict) -> None:
    """Under autocast, as ``enable_amp`` trains; every parameter has a gradient, and finite ones."""
    torch.set_default_dtype(torch.float32)
    model, x = Stack(names, kind, **options), torch.randn(sum(LENGTHS), D)
    full = model(x, context())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = model(x, context())
        half.float().pow(2).sum().backward()
    assert (half.float() - full).norm() < 0.1 * full.norm()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize(
    ("name", "options", "backbone"),
    [
        *((name, {}, "nope") for name in ("kernel", "cape", "t5", "hstu", "time_decay")),
        ("kernel", {"kernel_u": "full", "kernel_l": "full"}, "nope"),
        ("to_rope", {"fusion": "split_dim", "time_ratio": 0}, "rope"),
        ("to_rope", {"fusion": "split_head", "time_ratio": 1}, "time_rope"),
        ("to_rope", {"fusion": "early", "gate_value": 0}, "rope"),
        ("to_rope", {"fusion": "early", "gate_value": 1}, "time_rope"),
        ("to_rope", {**GATED, "gate": "hard", "gate_value": 0.5}, "rope"),
        ("to_rope", {**EARLY, "learn_frequencies": "ladder"}, "to_rope"),  # as the fixed ones
        ("to_rope", {**EARLY, "learn_frequencies": "free", "learn_scales": True}, "to_rope"),
        ("to_rope", {**EARLY, "fusion": "effective", "learn_frequencies": "free"}, "to_rope"),
    ],
    ids=str,
)
def test_fresh_schemes_equal_their_backbone(name: str, options: dict, backbone: str) -> None:
    inputs = qkv(sum(LENGTHS), 2, 16)
    want = attend(scheme(backbone, 2, d=16, **(EARLY if backbone == name else {})), *inputs)
    found = attend(scheme(name, 2, d=16, **options), *inputs)
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


# What schemes share, count and refuse


@pytest.mark.parametrize(("u", "low", "count"), [(0, 0, 33 + 198), (1, 0, 11 + 198), (1, 1, 77)])
def test_kernels_share_factors(u: bool, low: bool, count: int) -> None:
    """BK + K(K + 1)/2 parameters (section 3.4), shared as asked."""
    options = {**defaults("kernel"), "kernel_u_shared": bool(u), "kernel_l_shared": bool(low)}
    schemes = build_schemes("kernel", sizes(2, 11), options, has_attention=True)
    found = [schemes.attention().schemes["kernel"] for _ in range(3)]
    assert sum(p.numel() for p in {p for kernel in found for p in kernel.parameters()}) == count
    assert (found[0].U is found[2].U, found[1].L is found[2].L) == (bool(u), bool(low))


def test_layers_share_tables_and_what_depends_on_times_only(monkeypatch) -> None:
    for name, table in (("tisas", "time_key"), ("difsr", "position")):
        layers = Stack([name]).layers.layer
        one, two = (layer.multi_head_attention.position.schemes[name] for layer in layers)
        assert getattr(one, table) is getattr(two, table)
    made, make = [], time_intervals.map_spans
    monkeypatch.setattr(time_intervals, "map_spans", lambda *a: made.append(1) or make(*a))
    Stack(["hstu"])(torch.randn(sum(LENGTHS), D), context())
    assert len(made) == 1


def test_split_by_layer_and_by_share() -> None:
    """Of three layers at ratio 0.3 the last turns by time; shares are rounded, not none or all."""
    options = {**defaults("to_rope"), "fusion": "split_layer", "time_ratio": 0.3}
    dimensions = sizes(2, d=16, n_layers=3)
    schemes = build_schemes("to_rope", dimensions, options, has_attention=True)
    q, k, _ = qkv(sum(LENGTHS), 2, 16)
    for corner in ("rope", "rope", "time_rope"):
        want = scheme(corner, 2, d=16).rotate(q, k, context())
        torch.testing.assert_close(schemes.attention().rotate(q, k, context()), want)
    for ratio in (0.01, 0.3, 0.99):
        for fusion, whole in (("split_dim", 16), ("split_head", 8)):
            position = scheme("to_rope", 8, d=256, fusion=fusion, time_ratio=ratio)
            by_time = position.time_periods().isfinite()  # [8, 16]
            share = by_time[0].sum() if fusion == "split_dim" else by_time[:, 0].sum()
            assert share == min(max(round(ratio * whole), 1), whole - 1)


def test_buckets_of_times_equal_a_loop() -> None:
    """On both sides of the edges of buckets, and of times without a logarithm."""
    edges = [math.exp(0.301 * k) for k in range(1, 80)]
    seconds = [-5.0, 0.0, 0.5, 1.0, 1.35, 60.0, 1.5e9, 1e300, *range(5000)]
    seconds += [factor * edge for edge in edges for factor in (1 - 1e-9, 1 + 1e-9)]
    for buckets in (1, 5, 128):
        want = [reference.log_bucket(s, buckets) for s in seconds]
        assert time_intervals.find_bucket(torch.tensor(seconds), buckets).tolist() == want


@pytest.mark.parametrize(("elements", "lanes"), [(2**20, 32), (100, 4), (1, 1)])
def test_gradients_of_tables_over_times_equal_a_loop(monkeypatch, elements, lanes) -> None:
    """In one chunk and in several, with more copies of the table than interactions and fewer."""
    monkeypatch.setitem(large_products.CHUNK_ELEMENTS, "cpu", elements)
    monkeypatch.setattr(time_intervals, "LANES", lanes)
    position, ctx, q = scheme("hstu", 2), context(), torch.randn(len(LENGTHS), 2, N, D // 2)
    g = torch.randn(len(LENGTHS), 2, N, N).tril()
    (got,) = torch.autograd.grad((position.bias(q, q, ctx) * g).sum(), [position.time])
    want = torch.zeros(128)
    for b, rows in enumerate(rows_of(LENGTHS)):
        own = (ctx.times[rows] - ctx.times[rows.start]).tolist()
        own += [0.0] * (N - len(own))  # padding has the time of the oldest interaction
        for i, j in itertools.product(range(N), range(N)):
            want[reference.log_bucket(own[i] - own[j], 128)] += g[b, :, i, j].sum()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_many_float32_gradients_add_up() -> None:
    """A bucket may get millions of them: summed one after the other they would lose digits."""
    torch.set_default_dtype(torch.float32)
    position, g = scheme("hstu", n=1000), torch.rand(2, 1, 1000, 1000)
    ctx = context([1000] * 2, 1000, times=torch.full([2000], 1.5e9, dtype=torch.float64))
    position.bias(g, g, ctx).backward(g)
    assert position.time.grad[0].item() == pytest.approx(g.double().sum().item(), rel=1e-6)


def test_extremes_stay_finite() -> None:
    """Weights that underflow beside a long sequence, features that vanish, times years apart."""
    position = scheme("parec")
    with torch.no_grad():
        position.R.zero_()[:, :, :2] = 3e4
    v = torch.randn(2 + N, 1, D)
    assert attend(position, v, v, v, context([2, N])).isfinite().all()
    q, k, v = (x.float() for x in qkv(N))
    for one, other in ((q - 100, k), (q, k - 100)):
        assert attend(scheme("linear_attention"), one, other, v, context([N])).isfinite().all()
    times = torch.tensor([0.0, 0.0, 1e-3, 1.0, 4e8, 4e8], dtype=torch.float64) + 1.5e9
    for kind in ("exponential_power", "power"):
        decay, zero = scheme("time_decay", 2, decay_kind=kind), torch.zeros(1, 2, 6, D // 2)
        shake(decay)
        decay.bias(zero, zero, context([6], times=times)).tril().pow(2).sum().backward()
        assert all(p.grad.isfinite().all() and (p.grad != 0).all() for p in decay.parameters())


@pytest.mark.parametrize(
    ("name", "options", "field"),
    [
        ("t5", {"t5_buckets": 32, "t5_max_distance": 16}, "t5_buckets"),
        ("rope", {"heads": 8}, "rope"),
        ("to_rope", {**GATED, "gate_value": 0.0}, "gate_value"),
        ("to_rope", {"fusion": "effective"}, "fusion"),
        ("time_rope", {"time_min_period": 5.0, "time_max_period": 5.0}, "time_max_period"),
        ("calendar_rope", {"calendar_parts": ["hour", "day", "week"]}, "calendar_parts"),
        ("fuxi_linear", {"channel_share": 0.5}, "channel_share"),
    ],
    ids=str,
)
def test_what_schemes_refuse(name: str, options: dict, field: str) -> None:
    with pytest.raises(UsageError, match=field):
        scheme(name, **{"heads": 2, **options})


@pytest.mark.parametrize(
    ("hook", "wrong"),
    [
        ("bias", lambda q, k: torch.ones(q.size(-2), q.size(-2)) > 0),  # would undo the causal mask
        ("rotate", lambda q, k: (q[..., 1:], k)),
        ("attend", lambda q, k, v: v[1:]),
        ("forward", lambda x: x[:, :4]),
    ],
)
def test_what_a_custom_scheme_computes_is_checked(hook: str, wrong: Any) -> None:
    base = InputPosition if hook == "forward" else AttentionPosition
    num_inputs = wrong.__code__.co_argcount
    odd = type("Odd", (base,), {hook: lambda self, *given: wrong(*given[:num_inputs])})()
    composed_scheme = (ComposeInput if hook == "forward" else Compose)({"odd": odd})
    inputs = qkv(4)[:num_inputs] if hook != "forward" else [torch.randn(4, D)]
    call = getattr(composed_scheme, hook)
    with pytest.raises(UsageError, match=f"Odd.{hook}: expected"):
        call(*inputs, context([4]), *([Dropout(0.0)] if hook == "attend" else []))


def test_what_is_made_of_times_becomes_the_type_of_the_model() -> None:
    ages = type("Ages", (AttentionPosition,), {"bias": lambda self, q, k, ctx: torch.zeros(1, 1)})
    q, k, _ = (x.float() for x in qkv(4))
    assert Compose({"ages": ages()}).bias(q, k, context([4])).dtype == torch.float32


def test_schemes_that_cannot_be_used_together_or_by_the_model_are_refused() -> None:
    """A model without attention would ignore its schemes; one without a position is built."""
    with pytest.raises(UsageError, match="^position: found rope, kernel, expected .*no attention"):
        build_schemes(["learned", "rope", "kernel"], sizes(), defaults("learned", "rope", "kernel"))
    build_schemes("nope", sizes(), defaults("nope"))
    names = ["parec", "average"]
    with pytest.raises(UsageError, match="^position"):
        build_schemes(names, sizes(), defaults(*names), has_attention=True).attention()


def test_periods_of_planes_are_in_seconds() -> None:
    day, year = 86400.0, 365.2425 * 86400
    position = scheme("calendar_rope", 1, calendar_parts=["day", "week", "year"])
    assert position.time_periods().tolist() == [pytest.approx([day, 7 * day, year, day / 2])]
