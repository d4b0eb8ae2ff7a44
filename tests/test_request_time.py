"""request_time: target. A state reads the time of its request, and nothing else of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import reference
import torch
from conftest import write_atomic
from schemes import D, N, dot_product, qkv, scheme, shake, times_of
from torch import Tensor

import recbole_pos
from recbole_pos.config.arguments import ServeArguments
from recbole_pos.errors import RunWarning, UsageError
from recbole_pos.experiment.result import KNOWS_WHEN
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.padded import PaddedContext
from recbole_pos.position.schemes import SCHEMES
from recbole_pos.serve.bodies import RecommendBody, recommend

READS = [name for name, cls in SCHEMES.items() if cls.reads_request]
HOURS = 24


def test_which_schemes_read_it() -> None:
    assert READS == [name for name, cls in SCHEMES.items() if cls.needs_time]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", ["hstu", "time_decay", "time_rope", "to_rope"])
def test_queries_take_the_time_of_the_request(name: str) -> None:
    """Logits of query i and key j by t_{i+1} - t_j, against loops."""
    options = {"fusion": "early", "gate": "fixed"} if name == "to_rope" else {}
    position, (q, k, v) = scheme(name, **options), qkv(N)
    shake(position)
    times = times_of([N]) - 1.5e9
    at = times[-1:] + 5e5
    asked = [*times[1:].tolist(), at.item()]
    ctx = SequenceContext.from_lengths(torch.tensor([N]), N, times, at=at)
    bias = [[0.0] * N for _ in range(N)]
    if name == "hstu":
        for i in range(N):
            for j in range(i + 1):
                bucket = reference.log_bucket(asked[i] - times[j].item(), len(position.time))
                bias[i][j] = (position.distance[i - j] + position.time[bucket]).item()
    if name == "time_decay":
        a, s = position.strength[0].item(), math.exp(position.log_reach[0].item())
        b = math.log1p(math.exp(position.raw_power[0].item()))
        for i in range(N):
            for j in range(i + 1):
                bias[i][j] = a * 2 ** -((max(asked[i] - times[j].item(), 1e-9) / s) ** b)
    turned = q[:, 0], k[:, 0]
    if name in ("time_rope", "to_rope"):
        unit, by_order = 86400.0, None
        if name == "time_rope":
            by_time = position.bank()
        else:
            by_order, by_time = position.frequencies()
        angle = [
            [
                [
                    float(0 if by_order is None else by_order.flatten()[plane]) * n
                    + float(by_time.flatten()[plane]) * t / unit
                    for plane in range(D // 2)
                ]
                for n, t in enumerate(of)
            ]
            for of in (asked, times.tolist())
        ]
        turned = reference.turn(q[:, 0], angle[0]), reference.turn(k[:, 0], angle[1])
    want = reference.biased_attention(*turned, v[:, 0], bias)
    out = dot_product(position, q, k, v, ctx=ctx)
    torch.testing.assert_close(out[:, 0], want, rtol=1e-8, atol=1e-8)


@pytest.fixture
def model(experiment: Callable) -> Callable:
    def build(name: str, request_time: str = "target") -> torch.nn.Module:
        made = experiment("PosSASRec", position=[name], request_time=request_time, n_heads=2).model
        shake(made.trm_encoder)
        shake(made.position_embedding)
        return made.double().eval()

    return build


def window(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([7, 4])
    items = torch.randint(1, 30, (11,), generator=rng)
    gaps = (torch.rand(13, generator=rng, dtype=torch.float64) * 4).exp()
    times = torch.cat((gaps[:7].cumsum(0), gaps[7:11].cumsum(0))) + 1.6e9
    return items, lengths, times, times[[6, 10]] + gaps[11:]


def states(
    model: torch.nn.Module, items: Tensor, lengths: Tensor, times: Tensor, at: Tensor
) -> Tensor:
    ctx = SequenceContext.from_lengths(lengths, model.max_seq_length, times, items, at=at)
    with torch.no_grad():
        return model.encode(items, ctx)


@pytest.mark.parametrize("name", READS)
def test_a_state_reads_the_time_of_the_next_event_and_of_none_after(model, name: str) -> None:
    """Not the item of the next event, nor any time after it; other histories not at all."""
    made, (items, lengths, times, at) = model(name), window()
    known = states(made, items, lengths, times, at)
    for k in range(7):  # t_k is the request of state k - 1
        other_times, other_items = times.clone(), items.clone()
        other_times[k:7] += 1e5 * torch.arange(1, 8 - k)
        other_items[k:7] = other_items[k:7] % 30 + 1
        found = states(made, other_items, lengths, other_times, at + torch.tensor([2e6, 0]))
        assert torch.equal(found[: max(k - 1, 0)], known[: max(k - 1, 0)])
        assert torch.equal(found[7:], known[7:])
        if k > 1:
            assert not torch.equal(found[k - 1], known[k - 1]), "its own request changes a state"
            only_items = states(made, other_items, lengths, times, at)
            assert torch.equal(only_items[:k], known[:k])


@pytest.mark.parametrize("name", READS)
def test_recommending_is_asked_as_training_was(model, name: str) -> None:
    """State k of a window is that of the history up to k, asked at t_{k+1}; padded rows as well."""
    made, (items, lengths, times, at) = model(name), window()
    known = states(made, items, lengths, times, at)
    for k in range(6 if name != "tisas" else 0):  # whose positions count from the newest event
        part = slice(0, k + 1)
        one = made.after(items[part], torch.tensor([k + 1]), times[part], times[k + 1 : k + 2])
        torch.testing.assert_close(one[0], known[k], rtol=1e-6, atol=1e-6)
    rows, stamps = torch.zeros(2, 7, dtype=torch.long), torch.zeros(2, 7, dtype=torch.float64)
    rows[0], rows[1, :4], stamps[0], stamps[1, :4] = items[:7], items[7:], times[:7], times[7:]
    ctx = PaddedContext.from_rows(rows, lengths, made.max_seq_length, stamps, at)
    with torch.no_grad():
        padded = made.encode(rows.flatten(), ctx)
    torch.testing.assert_close(padded[ctx.last], known[[6, 10]], rtol=1e-6, atol=1e-6)
    moved = states(made, items, lengths, times + 86400.0 * 7, at + 86400.0 * 7)
    if name not in ("siren_rope", "rote"):  # which read the calendar: month and year move
        torch.testing.assert_close(moved, known, rtol=1e-4, atol=1e-4)


def test_training_windows_and_rows_carry_it(experiment: Callable) -> None:
    """The time of the target after the newest event, from the log."""
    for augmentation, windows in (("all_positions", "sliding"), ("prefix", "chunk")):
        made = experiment(
            "PosSASRec",
            position=["hstu"],
            request_time="target",
            augmentation=augmentation,
            train_windows=windows,
        )
        loader = made.trainer.training_loader(made.loaders["train"])
        batch = next(iter(loader))
        if augmentation == "prefix":
            batch = made.model.pack_rows(batch)
        log, last = made.dataset.log, batch.lengths.cumsum(0) - 1
        positions = torch.arange(len(batch.items)) if batch.positions is None else batch.positions
        target = batch.targets[torch.isin(positions, last)]
        known = set(zip(log.items.tolist(), log.times.tolist(), strict=True))
        assert set(zip(target.tolist(), batch.at.tolist(), strict=True)) <= known
        assert (batch.at >= batch.times[last]).all()
        made.model.eval()
        shake(made.model.trm_encoder)
        late = replace(batch, at=batch.at + 1e6)
        assert made.model.window_loss(batch) != made.model.window_loss(late)


@pytest.mark.parametrize(
    ("model_name", "options"),
    [
        ("PosSASRec", {"position": ["learned"]}),
        ("SASRec", {}),
        ("AttrFormer", {"position": ["time_rope"], "relations": ["time"]}),
    ],
)
def test_a_model_that_would_not_read_it_refuses(experiment, model_name: str, options: dict) -> None:
    with pytest.raises(UsageError) as caught:
        experiment(model_name, request_time="target", **options)
    assert str(caught.value).startswith("request_time")


def hourly(folder: Path, users: int = 60, length: int = 100) -> Path:
    """The next item is what the user takes at this hour; hours are sampled for every event."""
    rng = np.random.default_rng(0)
    hour = rng.integers(0, HOURS, (users, length))
    day = np.cumsum(rng.integers(1, 3, (users, length)), 1)
    frame = pd.DataFrame(
        {
            "user_id": np.repeat([f"u{u}" for u in range(users)], length),
            "item_id": [f"i{h}_{u % 4}" for u, row in enumerate(hour) for h in row],
            "timestamp": (1.6e9 // 86400 * 86400 + day * 86400 + hour * 3600).flatten(),
        }
    )
    return write_atomic(frame, folder, "hourly")


def test_the_hour_of_the_request_decides(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """In evaluation, in Python, and over HTTP."""
    folder = hourly(tmp_path)
    found = {}
    for request_time in ("target", "none"):
        options = {
            "data_path": str(folder),
            "position": ["calendar_rope"],
            "calendar_parts": ["day"],
            "request_time": request_time,
            "MAX_ITEM_LIST_LENGTH": 100,
            "hidden_size": 32,
            "inner_size": 32,
            "n_layers": 1,
            "n_heads": 1,
            "train_batch_size": 4,
            "learning_rate": 0.01,
            "epochs": 12,
        }
        run = recbole_pos.run(
            "PosSASRec", "hourly", None, options, tmp_path / request_time, verbose=False
        )
        found[request_time] = run.test["ndcg@10"]
        assert run.request_time == request_time
    chance = sum(1 / math.log2(rank + 1) for rank in range(1, 11)) / HOURS
    assert found["target"] > 0.9, found
    assert abs(found["none"] - chance) < 0.08, (found, chance)
    trained = recbole_pos.Recommender.load(tmp_path / "target")
    start = 1.6e9 // 86400 * 86400
    items = [f"i{hour}_2" for hour in range(HOURS)]
    history = {"items": items, "times": [start + 3600.0 * hour for hour in range(HOURS)]}
    ten = {**history, "at": "2020-09-20T10:00:00Z"}
    best = trained.recommend(histories=[ten, history], k=1, at=start + 86400 * 7 + 3600 * 15)
    assert best["item"].tolist() == ["i10_2", "i15_2"]
    asked = RecommendBody(histories=[history], k=1, at="2020-09-20T07:00:00Z")
    assert recommend(trained, asked, ServeArguments())[0]["items"] == ["i7_2"]
    assert not [w for w in recwarn if issubclass(w.category, RunWarning)]
    for _ in range(2):
        trained.recommend(histories=[history], k=1)  # now
    assert len([w for w in recwarn if issubclass(w.category, RunWarning)]) == 1
    with pytest.raises(UsageError) as caught:
        trained.recommend(histories=[history], at=start)  # before its newest interaction
    assert str(caught.value).startswith("at:")
    none = recbole_pos.Recommender.load(tmp_path / "none")
    with pytest.raises(UsageError) as caught:
        none.recommend(histories=[history], at=start + 1e7)
    assert str(caught.value).startswith("at:")
    folders = [str(tmp_path / name) for name in ("target", "none")]
    recbole_pos.compare(folders, run_dir=tmp_path / "both", verbose=False)
    assert KNOWS_WHEN in (tmp_path / "both" / "table.md").read_text(encoding="utf-8")


def test_a_table_does_not_mix_who_knows_the_time(tiny: Path) -> None:
    """Unless that is what is compared."""
    knows = {"model": "PosSASRec", "position": ["hstu"], "request_time": "target"}
    rows = {"knows": knows, "twin": {**knows, "request_time": "none"}, "other": {"model": "FPARec"}}
    study = {"dataset": "tiny", "base": {"data_path": str(tiny)}, "rows": rows}
    recbole_pos.compare(study, dry_run=True, verbose=False)
    del rows["twin"]
    with pytest.raises(UsageError) as caught:
        recbole_pos.compare(study, dry_run=True, verbose=False)
    assert str(caught.value).startswith("request_time: knows")
