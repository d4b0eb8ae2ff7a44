"""TO-RoPE: angles of time and order against the paper's formulas, corners, clocks."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import reference
import schemes as small
import torch
from conftest import make_log, write_atomic
from schemes import LENGTHS, N, context, rows_of, shake

from recbole_pos.errors import UsageError
from recbole_pos.layers.attention import MultiHeadAttention, TransformerEncoder
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.hooks import Dimensions
from recbole_pos.position.build import build_schemes
from recbole_pos.position.frequencies import FrequencyBank
from recbole_pos.yaml_files import ROOT, read_yaml

DAY = 86400.0
YEARS = 10 * 365.25 * DAY
USERS = [1, 1, 1, 2, 2]
HEADS, D = 2, 16
P = D // HEADS // 2  # four planes a head, so that each source has a bank of several when they split
scheme = functools.partial(small.scheme, d=D)
qkv = functools.partial(small.qkv, d=D)
block = functools.partial(small.block, hidden_size=D, inner_size=D, n_heads=HEADS)
FORMS = [
    {"fusion": "early"},
    {"fusion": "early", "gate_value": 0.3, "time_base": 50.0, "time_scale": 0.7},
    {"fusion": "early", "gate": "sigmoid", "gate_scope": "global", "learn_frequencies": "ladder"},
    {"fusion": "early", "gate": "sigmoid", "gate_scope": "plane", "learn_scales": True},
    {"fusion": "early", "gate": "sigmoid", "gate_scope": "head", "gate_value": 0.8},
    {"fusion": "early", "gate": "hard", "gate_scope": "head", "gate_value": 0.6},
    {"fusion": "split_dim"},
    {"fusion": "split_dim", "time_ratio": 0.25, "rope_scale": 0.6},
    {"fusion": "split_dim", "time_ratio": 0.75, "time_base": 50.0},
    {"fusion": "split_dim", "learn_frequencies": "free", "learn_scales": True},
    {"fusion": "split_head"},
    {"fusion": "split_head", "learn_frequencies": "ladder"},
    {"fusion": "effective", "learn_frequencies": "ladder", "gate_value": 0.4},
    {"fusion": "effective", "learn_frequencies": "free"},
]
pytestmark = pytest.mark.usefixtures("double")


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def bank_values(bank: FrequencyBank | None, start: list[float]) -> list[float]:
    """Frequencies times scales, from the parameters."""
    if bank is None:
        return []
    if bank.learn == "free":
        values = [math.exp(x) for x in bank.log.tolist()]
    elif bank.learn == "ladder":
        values = [math.exp(bank.log_first.item())]
        for raw in bank.raw_step.tolist():
            values.append(values[-1] / math.exp(softplus(raw)))
    else:
        values = start
    if bank.raw_scale is not None:
        values = [w * softplus(raw) for w, raw in zip(values, bank.raw_scale.tolist(), strict=True)]
    return values


DEFAULTS = read_yaml(ROOT / "position" / "to_rope.yaml")


def starts(options: dict, planes: int) -> tuple[list[float], list[float]]:
    """Banks of order and time as section 3.2 writes them; time in days."""
    given = {**DEFAULTS, **options}
    order = [given["rope_scale"] * given["rope_base"] ** (-k / planes) for k in range(planes)]
    if given["time_base"] is not None:
        time = [given["time_scale"] * given["time_base"] ** (-k / planes) for k in range(planes)]
    else:
        low, high = given["time_min_period"], given["time_max_period"]
        power = [k / (planes - 1) if planes > 1 else 0.5 for k in range(planes)]
        time = [2 * math.pi / (low * (high / low) ** x) for x in power]
    return order, time


def angle(position, options: dict, head: int, k: int, n: int, days: float) -> float:
    """Equation 4 for one plane, with the special cases of 4.1.2."""
    fusion, ratio, by_order, by_time = options["fusion"], options.get("time_ratio", 0.5), P, P
    if fusion == "split_head":
        time_gate = float(head >= HEADS // 2)
    elif fusion == "split_dim":  # a whole bank over the planes of each source
        by_time = int(P * ratio)
        by_order = P - by_time
        time_gate = float(k >= by_order)
        k -= by_order * (k >= by_order)
    elif fusion == "effective":
        time_gate = None
    elif position.gate_logit is None:
        time_gate = position.gate_value
    else:
        logit = position.gate_logit.expand(HEADS, P)[head, k].item()
        time_gate = 1 / (1 + math.exp(-logit))
        if options["gate"] == "hard":
            time_gate = float(time_gate > 0.5)
    order = bank_values(position.order, starts(options, by_order)[0]) if time_gate != 1 else None
    time = bank_values(position.clock, starts(options, by_time)[1]) if time_gate != 0 else None
    if time_gate is None:
        return order[k] * n + time[k] * days
    if order is None or time is None:
        return time[k] * days if order is None else order[k] * n
    return (1 - time_gate) * order[k] * n + time_gate * time[k] * days


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_equals_equation_4(options: dict) -> None:
    position = scheme("to_rope", HEADS, **options)
    shake(position)
    ctx = context()
    q, k, v = qkv(sum(LENGTHS), HEADS)
    out = MultiHeadAttention(block(), position)._dot_product(q, k, v, ctx)
    for rows in rows_of(LENGTHS):
        days = ((ctx.times[rows] - ctx.times[rows.start]) / 86400).tolist()
        for head in range(HEADS):
            angles = [
                [angle(position, options, head, k, n, day) for k in range(P)]
                for n, day in enumerate(days)
            ]
            turned = (reference.turn(x[rows, head], angles) for x in (q, k))
            want = reference.dot_product_attention(*turned, v[rows, head])
            torch.testing.assert_close(out[rows, head], want, rtol=1e-9, atol=1e-9)


def rotated(name: str, q, k, ctx, heads: int = HEADS, **options):
    return scheme(name, heads, **options).rotate(q, k, ctx)


@pytest.mark.parametrize("fusion", ["split_dim", "split_head", "split_layer"])
def test_corners_are_rope_and_time_rope(fusion: str) -> None:
    q, k, _ = qkv(sum(LENGTHS), HEADS)
    for ratio, corner in ((0, "rope"), (1, "time_rope")):
        got = rotated("to_rope", q, k, context(), fusion=fusion, time_ratio=ratio)
        torch.testing.assert_close(got, rotated(corner, q, k, context()), rtol=1e-12, atol=1e-12)


def test_a_fixed_gate_at_its_ends_is_rope_and_time_rope() -> None:
    q, k, _ = qkv(sum(LENGTHS), HEADS)
    for gate, corner in ((0, "rope"), (1, "time_rope")):
        got = rotated("to_rope", q, k, context(), fusion="early", gate_value=gate)
        torch.testing.assert_close(got, rotated(corner, q, k, context()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("learn", ["ladder", "free"])
def test_learned_frequencies_start_as_the_fixed_ones(learn: str) -> None:
    q, k, _ = qkv(sum(LENGTHS), HEADS)
    for fusion in ("split_dim", "split_head", "early"):
        fixed = rotated("to_rope", q, k, context(), fusion=fusion)
        for scales in (False, True):
            got = rotated(
                "to_rope", q, k, context(), fusion=fusion, learn_frequencies=learn,
                learn_scales=scales,
            )  # fmt: skip
            torch.testing.assert_close(got, fixed, rtol=1e-9, atol=1e-9)
    given = {"gate_value": 0.3, "learn_frequencies": learn}
    effective = rotated("to_rope", q, k, context(), fusion="effective", **given)
    early = rotated("to_rope", q, k, context(), fusion="early", gate_value=0.3)
    torch.testing.assert_close(effective, early, rtol=1e-9, atol=1e-9)


def test_split_by_layer() -> None:
    """Of three layers at ratio 0.3 the last turns by time, the others by order."""
    options = {**DEFAULTS, "fusion": "split_layer"}
    sizes = Dimensions(N, D, HEADS, 1.0, n_layers=3)
    schemes = build_schemes("to_rope", sizes, {**options, "time_ratio": 0.3})
    q, k, _ = qkv(sum(LENGTHS), HEADS)
    for corner in ("rope", "rope", "time_rope"):
        got = schemes.attention().rotate(q, k, context())
        torch.testing.assert_close(got, rotated(corner, q, k, context()), rtol=1e-12, atol=1e-12)


def test_fresh_periods_stay_as_they_were() -> None:
    """What a learned bank is compared with after training."""
    position = scheme("to_rope", HEADS, fusion="early", learn_frequencies="free")
    before = position.time_periods()
    shake(position)
    assert torch.equal(position.fresh_periods, before)
    assert not torch.allclose(position.time_periods(), before)


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.3, 0.5, 0.9, 0.99])
def test_ratio_is_the_share_of_time(ratio: float) -> None:
    """16 planes, 8 heads: rounded shares, and never none or all."""
    sizes = Dimensions(N, 256, 8, 1.0)
    defaults = {**DEFAULTS, "time_ratio": ratio}
    for fusion, whole in (("split_dim", 16), ("split_head", 8)):
        made = build_schemes("to_rope", sizes, {**defaults, "fusion": fusion}).attention()
        finite = made.schemes["to_rope"].time_periods().isfinite()  # [8, 16]
        share = finite[0].sum() if fusion == "split_dim" else finite[:, 0].sum()
        assert share == min(max(round(ratio * whole), 1), whole - 1)


def encoder(name: str, **options) -> torch.nn.Module:
    given = {**read_yaml(ROOT / "position" / f"{name}.yaml"), **options}
    schemes = build_schemes(name, Dimensions(N, D, HEADS, 0.5, n_layers=2), given)
    made = TransformerEncoder(block(), 2, schemes.attention)
    shake(made)
    return made


@pytest.mark.parametrize(
    "options", [*FORMS, {"fusion": "split_layer"}, {"name": "time_rope"}], ids=str
)
def test_times_to_come_have_no_gradient(options: dict) -> None:
    """The output at step t has zero gradient to later times, and some to earlier ones."""
    options = dict(options)
    layers = encoder(options.pop("name", "to_rope"), **options)
    plain = context()
    times = plain.times.clone().requires_grad_()
    ctx = SequenceContext.from_lengths(plain.lengths, N, times)
    out = layers(torch.randn(sum(LENGTHS), D), ctx)
    for t in range(len(out)):
        (grad,) = torch.autograd.grad(out[t].sum(), times, retain_graph=True)
        allowed = (ctx.row == ctx.row[t]) & (ctx.index <= ctx.index[t])
        assert (grad[~allowed] == 0).all()
        if ctx.index[t] > 0:
            assert grad[allowed].abs().sum() > 0


@pytest.mark.parametrize("options", [*FORMS, {"name": "time_rope"}], ids=str)
def test_ten_years_later_and_one_second(options: dict) -> None:
    """In float32: a shift of all times changes nothing, a second does."""
    options = dict(options)
    name = options.pop("name", "to_rope")
    torch.set_default_dtype(torch.float32)
    layers = encoder(name, **{"time_min_period": 1e-3, **options})
    x, plain = torch.randn(sum(LENGTHS), D), context()

    def out(times):
        return layers(x, SequenceContext.from_lengths(plain.lengths, N, times))

    before = out(plain.times)
    assert (out(plain.times + YEARS) - before).abs().max() < 1e-6
    later = plain.times.clone()
    later[LENGTHS[0] - 1] += 1.0
    change = (out(later) - before).abs().amax(1)
    assert change[LENGTHS[0] - 1] > 1e-6
    assert change[: LENGTHS[0] - 1].max() == 0 and change[LENGTHS[0] :].max() == 0


def test_a_second_is_seen_after_thirty_years() -> None:
    """Whole turns are taken away in float64, before anything is cast down."""
    torch.set_default_dtype(torch.float32)
    q = torch.ones(3, HEADS, D // HEADS)
    start = 1e8
    times = torch.tensor([start, start + 3 * YEARS, start + 3 * YEARS + 1], dtype=torch.float64)
    ctx = SequenceContext.from_lengths(torch.tensor([3]), N, times)
    options = {"time_unit": "seconds", "time_min_period": 60.0, "time_max_period": 3600.0}
    turned, _ = rotated("time_rope", q, q, ctx, **options)
    angle = [float(v) for v in torch.atan2(turned[:, 0, P], turned[:, 0, 0]) - math.pi / 4]
    expected = (2 * math.pi / 60) % (2 * math.pi)
    assert (angle[2] - angle[1]) % (2 * math.pi) == pytest.approx(expected, abs=1e-5)


def test_hard_gates_learn() -> None:
    position = scheme("to_rope", HEADS, fusion="early", gate="hard", gate_value=0.6)
    q, k, v = qkv(sum(LENGTHS), HEADS)
    out = MultiHeadAttention(block(), position)._dot_product(q, k, v, context())
    out.pow(2).sum().backward()
    assert position.gate_logit.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "options,message",
    [
        ({"gate": "sigmoid"}, "belongs to fusion: early"),
        ({"fusion": "early", "gate": "sigmoid", "gate_value": 0.0}, "gate_value"),
        ({"fusion": "effective"}, "learn_frequencies"),
        ({"time_min_period": 10.0, "time_max_period": 1.0}, "time_min_period"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        scheme("to_rope", HEADS, **options)


def test_one_head_cannot_be_split() -> None:
    with pytest.raises(UsageError, match="raise n_heads"):
        scheme("to_rope", 1, fusion="split_head")


def test_the_time_of_the_target_is_never_read(experiment) -> None:
    """Another time of the held-out event leaves its scores alone; of the history it does not."""
    torch.set_default_dtype(torch.float32)
    made = experiment("TORoPE")
    model = made.model.eval()
    batch = next(iter(made.loaders["test"]))[0].to(model.device)
    assert model.TIME_SEQ in batch.columns
    with torch.no_grad():
        before = model.full_sort_predict(batch)
        batch[made.dataset.time_field] = batch[made.dataset.time_field] + 1e6
        assert torch.equal(model.full_sort_predict(batch), before)
        batch[model.TIME_SEQ] = batch[model.TIME_SEQ] ** 1.01
        assert not torch.equal(model.full_sort_predict(batch), before)


def test_a_constant_time_field_stops_a_time_aware_model(experiment, tmp_path) -> None:
    torch.set_default_dtype(torch.float32)
    frame = make_log()
    frame["timestamp"] = 5.0
    folder = str(write_atomic(frame, tmp_path, "still"))
    with pytest.raises(UsageError, match="the same for all events"):
        experiment("TORoPE", "still", data_path=folder)
    with pytest.raises(UsageError, match="for all events"):  # RecBole's own entry builds it alone
        made = experiment("PosSASRec", "still", data_path=folder)
        made.config["position"] = ["time_learned"]
        made.config["time_buckets"], made.config["time_from"] = 8, "first"
        type(made.model)(made.config, made.dataset)


def test_units_of_the_time_field(experiment, tmp_path) -> None:
    """The same log in milliseconds gives the same model output."""
    torch.set_default_dtype(torch.float32)
    outs = []
    for unit, factor in (("seconds", 1), ("milliseconds", 1000)):
        frame = make_log()
        frame["timestamp"] = np.round(frame["timestamp"]) * factor
        folder = str(write_atomic(frame, tmp_path / unit, "clock"))
        made = experiment("TORoPE", "clock", data_path=folder, timestamp_unit=unit)
        batch = next(iter(made.loaders["test"]))[0].to(made.model.device)
        with torch.no_grad():
            outs.append(made.model.eval().full_sort_predict(batch))
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)
