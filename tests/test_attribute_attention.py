"""TiSASRec's and DIF-SR's attention as schemes: formulas in loops, what layers share, options."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from schemes import LENGTHS, D, N, attend, context, qkv, rows_of, scheme, shake
from shop import LOAD, SIZES, tables, write

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import prepare

pytestmark = pytest.mark.usefixtures("double")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("shop"), tables())


def open_with(folder: Path, **options):
    """PosSASRec on the shop."""
    skip = ("relation_heads", "relation_size", "top_k")
    given = {key: value for key, value in SIZES.items() if key not in skip}
    given |= {"data_path": str(folder), "load_col": LOAD, "filter_inter_by_user_or_item": False}
    return prepare(PosConfig("PosSASRec", "shop", None, {**given, **options}))


def intervals(times: list[float], longest: int) -> list[list[int]]:
    """r_ij of TiSASRec with the shortest gap up to i."""
    out = []
    for i in range(len(times)):
        gaps = [b - a for a, b in zip(times, times[1 : i + 1], strict=False) if b > a]
        unit = min(gaps, default=1.0)
        out.append([min(math.floor((times[i] - times[j]) / unit), longest) for j in range(i + 1)])
    return out


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("longest", [3, 1000])
def test_tisasrec(heads: int, longest: int) -> None:
    position = scheme("tisas", heads, tisas_intervals=longest)
    shake(position)
    ctx, (q, k, v), e = context(), qkv(sum(LENGTHS), heads), D // heads
    out, weights = attend(position, q, k, v, ctx), position.pair_weights(q, k, ctx)
    for number, rows in enumerate(rows_of(LENGTHS)):
        t = rows.stop - rows.start
        between = intervals(ctx.times[rows].tolist(), longest)
        for head in range(heads):
            part = slice(head * e, (head + 1) * e)
            tables = [
                getattr(position, f"{a}_{b}")
                for a in ("time", "position")
                for b in ("key", "value")
            ]
            r_key, r_value, p_key, p_value = (table[:, part] for table in tables)
            for i in range(t):
                logits, values = [], []
                for j in range(i + 1):
                    at, row = between[i][j], N - t + j
                    key = k[rows][j, head] + r_key[at] + p_key[row]
                    logits.append((q[rows][i, head] @ key).item() / math.sqrt(e))
                    values.append(v[rows][j, head] + r_value[at] + p_value[row])
                weight = torch.tensor(logits).softmax(0)
                want = sum(w * value for w, value in zip(weight, values, strict=True))
                torch.testing.assert_close(out[rows][i, head], want, rtol=1e-9, atol=1e-9)
                torch.testing.assert_close(weights[number, head, i, : i + 1], weight)
                assert (weights[number, head, i, i + 1 :] == 0).all()


def test_intervals_do_not_know_what_comes_later() -> None:
    """Another time of the newest event leaves all others as they are."""
    position = scheme("tisas", tisas_intervals=50)
    shake(position)
    q, k, v = qkv(6)
    times = torch.tensor([0.0, 10, 25, 25, 60, 61])
    later = times.clone()
    later[-1] = 5000.0
    one, two = (attend(position, q, k, v, context([6], times=t)) for t in (times, later))
    assert torch.equal(one[:-1], two[:-1]) and not torch.equal(one[-1], two[-1])


def test_difsr(folder: Path) -> None:
    """Logits of items, position, brand and tags, added up; values of items alone."""
    made = open_with(folder, position=["difsr"], difsr_fields=["brand", "tags"], difsr_size=6)
    model = made.model.double().eval()
    shake(model)
    items = torch.tensor([1, 2, 3, 4, 5, 20, 7, 7])
    lengths = [5, 3]
    layer = model.trm_encoder.layer[0].multi_head_attention
    bias = layer.position.schemes["difsr"]
    ctx = context(lengths, n=5)
    object.__setattr__(ctx, "items", items)
    x = torch.randn(8, 8)
    out = layer.attention(x, ctx)
    vectors = {}
    for number, field in enumerate(["brand", "tags"]):
        tokens = made.dataset.item_feat[field].reshape(made.dataset.item_num, -1)[items]
        rows = [[bias.tables[number][t] for t in row if t > 0] for row in tokens]
        zero = torch.zeros(6)
        vectors[number + 1] = torch.stack([sum(r, zero) / max(len(r), 1) for r in rows])
    assert any((vector == 0).all(1).any() for vector in vectors.values())
    for rows in rows_of(lengths):
        t = rows.stop - rows.start
        own = {0: bias.position[5 - t :], **{n: vector[rows] for n, vector in vectors.items()}}
        q, k, v = (getattr(layer, name)(x[rows]) for name in ("query", "key", "value"))
        heads = []
        for head in range(2):
            total = torch.zeros(t, t)
            for n, vector in own.items():
                e = vector.size(1) // 2
                part = slice(head * e, (head + 1) * e)
                left, right = bias.queries[n](vector)[:, part], bias.keys[n](vector)[:, part]
                total += left @ right.t() / math.sqrt(e)
            part = slice(4 * head, 4 * head + 4)
            given = (q[:, part], k[:, part], v[:, part], total.tolist())
            heads.append(reference.biased_attention(*given))
        torch.testing.assert_close(out[rows], layer.dense(torch.cat(heads, 1)))


@pytest.mark.parametrize(
    "options",
    [{"position": ["tisas"]}, {"position": ["difsr"], "difsr_fields": ["brand", "tags"]}],
    ids=str,
)
def test_layers_share_tables_and_all_of_it_is_trained(folder: Path, options: dict) -> None:
    torch.set_default_dtype(torch.float32)
    made = open_with(folder, **options)
    (name,) = options["position"]
    layers = [layer.multi_head_attention.position for layer in made.model.trm_encoder.layer]
    one, two = (position.schemes[name] for position in layers[:2])
    shared = ["time_key", "position_value"] if name == "tisas" else ["position", "tables"]
    assert all(getattr(one, key) is getattr(two, key) for key in shared)
    batch = next(iter(made.trainer.training_loader(made.loaders["train"])))
    made.model.window_loss(batch).backward()
    for key, p in made.model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), key
    rows = made.loaders["test"]._dataset[np.arange(6)]
    together = made.model.eval().full_sort_predict(rows)
    torch.testing.assert_close(made.model.full_sort_predict(rows[2:3])[0], together[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position": ["tisas"], "tisas_intervals": 0}, "tisas_intervals must be at least 1"),
        ({"position": ["difsr"], "difsr_size": 7}, "difsr_size 7 is not a multiple of n_heads 2"),
        (
            {"position": ["difsr"], "difsr_fields": ["price"]},
            "'price' must be a token",
        ),
        ({"position": ["difsr"], "difsr_fields": ["brnd"]}, "field 'brnd' is not loaded"),
        ({"position": ["difsr"], "difsr_fields": "brnd"}, "field 'brnd' is not loaded"),
    ],
)
def test_bad_options(folder: Path, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_with(folder, **options)
