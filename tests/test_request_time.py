"""request_time: target. A state reads the time of its request, and nothing else of it."""

import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import make_log, train, write_atomic
from schemes import LENGTHS, D, N, context, shake, sizes, times_of
from torch import Tensor

import recbole_pos
from recbole_pos.errors import RunWarning, UsageError
from recbole_pos.experiment.folder import REQUEST_TIME_WARNING
from recbole_pos.layers.sequence_batch import PaddedBatch, SequenceBatch
from recbole_pos.position.schemes import SCHEMES
from recbole_pos.serve.http import RecommendBody, recommend
from recbole_pos.study.comparing import _check_configurations
from recbole_pos.study.configs import exclude_unread
from recbole_pos.study.plan import Source
from recbole_pos.study.study_file import make_plan, plan_models

READS = [name for name, cls in SCHEMES.items() if cls.reads_request]
HOURS, DAY = 24, 1.6e9 // 86400 * 86400


@pytest.fixture
def model(experiment: Callable) -> Callable:
    def build(name: str) -> torch.nn.Module:
        options = {"train_windows": "prefix"} if name == "request_age" else {}
        options |= {"position": [name], "request_time": "target", "n_heads": 2}
        made = experiment("PosSASRec", **options).model
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
    n = model.max_seq_length
    with torch.no_grad():
        return model.encode(SequenceBatch.from_lengths(items, lengths, n, times=times, at=at))


@pytest.mark.parametrize("name", [name for name in READS if name != "request_age"])
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
    # these count from the newest event or from the request after it
    for k in range(0 if name in ("tisas", "request_age") else 6):
        part = slice(0, k + 1)
        asked = times[part], times[k + 1 : k + 2]
        one = made.encode(made.make_batch(items[part], torch.tensor([k + 1]), *asked))
        torch.testing.assert_close(one[0], known[k], rtol=1e-6, atol=1e-6)
    rows, stamps = torch.zeros(2, 7, dtype=torch.long), torch.zeros(2, 7, dtype=torch.float64)
    rows[0], rows[1, :4], stamps[0], stamps[1, :4] = items[:7], items[7:], times[:7], times[7:]
    with torch.no_grad():
        padded = made.encode(PaddedBatch.from_rows(rows, lengths, made.max_seq_length, stamps, at))
    torch.testing.assert_close(padded, known[[6, 10]], rtol=1e-6, atol=1e-6)
    moved = states(made, items, lengths, times + 86400.0 * 7, at + 86400.0 * 7)
    if name != "rote":  # which reads the calendar: month and year move
        torch.testing.assert_close(moved, known, rtol=1e-4, atol=1e-4)


def test_the_newest_time_is_read_only_where_nothing_leaks(experiment: Callable) -> None:
    """Refused on all positions; with a target a history, a state knows no time of another."""
    with pytest.raises(UsageError, match="^position: request_age .*train_windows: prefix"):
        experiment("PosSASRec", position=["request_age"])
    made = experiment("PosSASRec", position=["request_age"], train_windows="prefix")
    batch = next(iter(made.trainer.training_loader(made.loaders["train"])))
    made.model.eval()
    assert batch.at is None and torch.equal(batch.queries, batch.last)
    assert (batch.times <= batch.times[batch.last][batch.row]).all()  # none of a target
    long = int(batch.lengths.argmax())
    later = batch.times + 1e6 * torch.isin(torch.arange(len(batch.row)), batch.last[long])
    with torch.no_grad():
        known, found = (made.model.encode(replace(batch, times=t)) for t in (batch.times, later))
    is_same = (known == found).all(1)
    assert not is_same[long] and is_same.sum() == len(known) - 1


@pytest.mark.parametrize(
    ("augmentation", "windows"), [("all_positions", "sliding"), ("prefix", "chunk")]
)
def test_training_windows_and_rows_carry_it(experiment, augmentation: str, windows: str) -> None:
    """The time of the target after the newest event, from the log."""
    options = {"position": ["hstu"], "request_time": "target"}
    made = experiment("PosSASRec", augmentation=augmentation, train_windows=windows, **options)
    batch = next(iter(made.trainer.training_loader(made.loaders["train"])))
    if augmentation == "prefix":
        batch = made.model.pack(batch)
    log, last = made.dataset.log, batch.lengths.cumsum(0) - 1
    target = batch.targets[torch.isin(batch.take_queries(torch.arange(len(batch.items))), last)]
    known = set(zip(log.items.tolist(), log.times.tolist(), strict=True))
    assert set(zip(target.tolist(), batch.at.tolist(), strict=True)) <= known
    assert (batch.at >= batch.times[last]).all()
    shake(made.model.eval().trm_encoder)
    late = replace(batch, at=batch.at + 1e6)
    assert made.model.window_loss(batch) != made.model.window_loss(late)


def hourly(folder: Path) -> Path:
    """The next item is what the user takes at this hour; hours are sampled for every event."""
    users, length = 60, 100
    rng = np.random.default_rng(0)
    hour = rng.integers(0, HOURS, (users, length))
    day = np.cumsum(rng.integers(1, 3, (users, length)), 1)
    frame = pd.DataFrame(
        {
            "user_id": np.repeat([f"u{u}" for u in range(users)], length),
            "item_id": [f"i{h}_{u % 4}" for u, row in enumerate(hour) for h in row],
            "timestamp": (DAY + day * 86400 + hour * 3600).flatten(),
        }
    )
    return write_atomic(frame, folder, "hourly")


@pytest.mark.parametrize("start", [0, DAY])
def test_a_run_knows_whether_its_times_are_dates(tmp_path: Path, start: float) -> None:
    """Now is no time of a running number; a history may be ahead of this machine's clock."""
    log = make_log()
    log["timestamp"] = start + np.arange(len(log))
    options = {"position": ["hstu"], "request_time": "target"}
    data = write_atomic(log, tmp_path / "data")
    run = train(data, tmp_path / "run", "PosSASRec", **options)
    trained = recbole_pos.Recommender.load(run, histories_only=True)
    history = {"items": ["i1", "i2"], "times": [start + 1, start + 2]}
    if start == 0:
        with pytest.raises(UsageError, match="^at: the time field counts no time"):
            trained.recommend(histories=[history])
        return
    newest = time.time() + 60
    ahead = {"items": ["i3", "i4"], "times": [newest - 9, newest]}
    with pytest.warns(RunWarning, match="now is taken"):
        found = trained.recommend(histories=[history, ahead]).query("id == 1")
    want = trained.recommend(histories=[{**ahead, "at": newest}])
    np.testing.assert_allclose(found["score"], want["score"], rtol=1e-5)


def test_the_hour_of_the_request_decides(tmp_path: Path) -> None:
    """In evaluation, in Python, and over HTTP; without it the hour is a guess of one in 24."""
    options = {"position": ["calendar_rope"], "calendar_parts": ["day"], "request_time": "target"}
    options |= {"MAX_ITEM_LIST_LENGTH": 100, "hidden_size": 32, "inner_size": 32, "n_layers": 1}
    options |= {"n_heads": 1, "train_batch_size": 4, "learning_rate": 0.01, "epochs": 12}
    options["data_path"] = str(hourly(tmp_path))
    run = recbole_pos.run("PosSASRec", "hourly", None, options, tmp_path / "run", verbose=False)
    assert run.test["ndcg@10"] > 0.9 and run.request_time == "target"
    trained = recbole_pos.Recommender.load(tmp_path / "run")
    items = [f"i{hour}_2" for hour in range(HOURS)]
    history = {"items": items, "times": [DAY + 3600.0 * hour for hour in range(HOURS)]}
    ten = {**history, "at": "2020-09-20T10:00:00Z"}
    best = trained.recommend(histories=[ten, history], k=1, at=DAY + 86400 * 7 + 3600 * 15)
    assert best["item"].tolist() == ["i10_2", "i15_2"]
    asked = RecommendBody(histories=[history], k=1, at="2020-09-20T07:00:00Z")
    assert recommend(trained, asked)[0].items == ["i7_2"]
    with pytest.raises(UsageError, match="^at:"):
        trained.recommend(histories=[history], at=DAY)  # before its newest interaction
    milliseconds = {"items": items, "times": [1000 * time for time in history["times"]]}
    for given, at in ((milliseconds, None), (history, 1.6e12), (history, "2999-01-01")):
        with pytest.raises(UsageError, match="in no year that can be meant.*counts seconds"):
            trained.recommend(histories=[given], at=at)


def test_results_say_who_knows_the_time(trained: Callable, tmp_path: Path) -> None:
    folders = [trained("PosSASRec", position=["hstu"], request_time=x) for x in ("target", "none")]
    recbole_pos.compare(folders, run_dir=tmp_path / "table", verbose=False)
    assert REQUEST_TIME_WARNING in (tmp_path / "table" / "table.md").read_text(encoding="utf-8")
    history = {"items": ["i1"], "times": [1.5e9]}
    with pytest.raises(UsageError, match="^at:"):  # it has learned nothing of it
        recbole_pos.Recommender.load(folders[1]).recommend(histories=[history], at=1.6e9)


def test_a_table_does_not_mix_who_knows_the_time(tiny: Path) -> None:
    """Unless that is what is compared; models that cannot know it are named before training."""

    def check(models: list[str], **more: Any) -> None:
        base = {"data_path": str(tiny), "request_time": "target", **more}
        plan = plan_models("tiny", models, base=base)
        exclude_unread(plan)
        _check_configurations(plan)

    with pytest.raises(UsageError, match="^request_time: TORoPE knows the time .* others do not"):
        check(["PosSASRec", "TORoPE"])
    with pytest.raises(UsageError, match="request_time is not read by AttrFormer"):
        check(["AttrFormer"])
    check(["PosSASRec", "TORoPE"], position=["hstu"])
    knows = {"model": "PosSASRec", "position": ["hstu"], "request_time": "target"}
    rows = {"knows": knows, "twin": {**knows, "request_time": "none"}, "other": {"model": "FPARec"}}
    study = {"dataset": "tiny", "base": {"data_path": str(tiny)}, "rows": rows}
    _check_configurations(make_plan(Source("study", study)))


def test_the_scheme_of_the_page_reads_the_time_of_the_request() -> None:
    page = (Path(__file__).parent.parent / "docs" / "add_a_scheme.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(class Freshness.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"recbole_pos": recbole_pos, "torch": torch, "nn": torch.nn}
    exec(code, names)
    scheme, q = names["Freshness"](sizes(2), freshness_slope=2.0), torch.zeros(4, 2, N, D // 2)
    newest = torch.tensor(LENGTHS).cumsum(0) - 1
    for hours in (0.0, 5.0):
        ctx = context(at=times_of(LENGTHS)[newest] + 3600 * hours)
        for history, length in enumerate(LENGTHS):
            found = scheme.bias(q, q, ctx)[history, :, length - 1, length - 1]
            torch.testing.assert_close(found, torch.full((2,), -2 * math.log(1 + hours)))
