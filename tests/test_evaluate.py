"""Metrics of a run: by its best weights, of one's own, or over the catalogue in parts."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import SMALL, make_log, small, write_atomic

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config import plugins
from recbole_pos.config.metrics import CUSTOM
from recbole_pos.config.plugins import pack, unpack
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import CheckpointError, UsageError
from recbole_pos.experiment import evaluation
from recbole_pos.experiment.build import prepare
from recbole_pos.experiment.evaluation import EVENT, ITEMS, RANK, RowScores, TargetCollector
from recbole_pos.layers import large_products
from recbole_pos.layers.large_products import Choice, products
from recbole_pos.serve.recommender import find_best_items


@pytest.fixture
def run(trained, tmp_path) -> Path:
    whole = trained("PosSASRec", epochs=3, stopping_step=1)
    return Path(shutil.copytree(whole, tmp_path / "run"))


def result(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())


def test_its_own_metrics_come_out_the_same(run) -> None:
    """By its best weights, whatever a loaded model has; and others, as the ranks give them."""
    assert recbole_pos.evaluate(run, part="valid") == result(run)["best_valid"]
    assert recbole_pos.evaluate(run) == result(run)["test"]
    ranks = pd.read_parquet(run / "test_ranks.parquet")["rank"]
    mean = ((ranks < 3) / (ranks + 1)).mean()
    assert recbole_pos.evaluate(run, "MRR", 3) == {"mrr@3": pytest.approx(mean, abs=1e-4)}
    made = recbole_pos.load(run)
    torch.nn.init.zeros_(made.model.item_embedding.weight)
    assert made.trainer.evaluate(made.loaders["test"]) == result(run)["test"]


def test_seen_items_can_be_excluded_from_an_evaluation(trained, capsys) -> None:
    """As in a run with that option, whose training is the same."""
    run, masking_run = trained("PosSASRec"), trained("PosSASRec", mask_history=True)
    model = recbole_pos.load(run)
    masked, usual = model.evaluate(mask_history=True), model.evaluate()
    assert masked["test"].to_dict() == result(masking_run)["test"] != usual["test"].to_dict()
    assert masked.attrs["candidates"] == "items not in the user's past"
    assert usual.attrs["candidates"] == "all items"
    assert main(["evaluate", str(run), "--mask_history=true"]) == 0
    repeats = result(run)["split"]["repeated_targets"]["test"]
    assert f"{repeats} of them repeated" in " ".join(capsys.readouterr().out.split())


def test_data_that_have_grown_give_the_same_metrics(run, tmp_path: Path) -> None:
    """Later interactions are no targets, and change none; other changes are refused."""
    log = make_log()
    later = log.groupby("user_id", as_index=False).last()
    grown = pd.concat([log, later.assign(timestamp=log["timestamp"].max() + 5)])
    write_atomic(grown, tmp_path / "grown")
    found = recbole_pos.evaluate(run, mask_history=True, data_path=tmp_path / "grown")
    assert found == recbole_pos.evaluate(run, mask_history=True)
    write_atomic(log.iloc[1:], tmp_path / "less")
    with pytest.raises(CheckpointError, match="interactions"):
        recbole_pos.evaluate(run, mask_history=True, data_path=tmp_path / "less")


@pytest.mark.parametrize("words", ["--metrics=Nonsense", "--topk=400", "--part=train"])
def test_wrong_questions_are_refused(run, refused, words) -> None:
    line = refused(["evaluate", run, words], words.partition("=")[0].lstrip("-"))
    assert "valid_metric" not in line  # which is no option of evaluate


# --- ranks of test targets ---

OPTIONS = {"epochs": 1, "show_progress": False, "topk": [1, 3, 7], "valid_metric": "NDCG@3"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("FPARec", {}),
    ("Pop", {}),  # many equal scores
    ("BPR", {"mask_history": False}),
    ("PosSASRec", {"mask_history": True}),
    ("PosSASRec", {"eval_args": {"split": {"GT": [0.6, 0.8]}}}),
]


@pytest.mark.parametrize(("model", "options"), CASES, ids=str)
def test_ranks_equal_a_loop(tiny, tmp_path, model, options) -> None:
    given = {**OPTIONS, "data_path": str(tiny), **options}
    recbole_pos.run(model, "tiny", None, given, run_dir=tmp_path / "run", verbose=False)
    table = pd.read_parquet(tmp_path / "run" / "test_ranks.parquet")
    made = recbole_pos.load(tmp_path / "run")
    log, tokens = made.dataset.log, made.dataset.field2id_token
    sold = np.bincount(log.items.numpy()[made.dataset.part == 0], minlength=made.dataset.item_num)
    place = 0
    for rows, _, _, target in made.loaders["test"]:
        with torch.no_grad():
            scores = made.model.full_sort_predict(rows).view(len(rows), -1)
        for line, item, event in zip(scores, target, rows["target_event"], strict=True):
            found = table.iloc[place]
            place += 1
            line[0] = -torch.inf
            history = log.items[int(log.starts[event]) : event].tolist()
            excludes_seen = made.config["mask_history"] or (model == "Pop" and not options)
            if excludes_seen:
                line[[seen for seen in history if seen != item]] = -torch.inf
            before = (line > line[item]) | ((line == line[item]) & (torch.arange(len(line)) < item))
            is_miss = excludes_seen and item in history
            assert found["rank"] == (len(line) - 1 if is_miss else int(before.sum()))
            assert found["user"] == tokens["user_id"][log.users[event]]
            assert found["item"] == tokens["item_id"][item]
            assert found["history"] == len(history)
            assert found["age"] == log.times[event] - log.times[event - 1]
            assert found["popularity"] == sold[item]
    assert place == len(table)
    test = json.loads((tmp_path / "run" / "result.json").read_text())["test"]
    for k in OPTIONS["topk"]:
        ndcg = np.where(table["rank"] < k, 1 / np.log2(table["rank"] + 2), 0.0).mean()
        assert test[f"ndcg@{k}"] == pytest.approx(ndcg, abs=1e-6)


def test_repeats_and_habit_equal_a_loop(monkeypatch) -> None:
    monkeypatch.setattr(evaluation, "BLOCK", 7)
    rng = np.random.default_rng(0)
    users, items = np.sort(rng.integers(1, 9, 300)), rng.integers(1, 7, 300)
    times, targets = np.sort(rng.random(300) * 40 * 24), rng.permutation(300)[:90]
    found = evaluation.find_repeats(users, items, times, targets, unit=3600)
    for target, *repeats_and_habit in zip(targets, *found, strict=True):
        same = (users[:target] == users[target]) & (items[:target] == items[target])
        near = np.isin((times[:target][same] // 1 - times[target] // 1) % 24, (23, 0, 1))
        wanted = [near.size, 100 * pd.Series(near).mean()]
        assert repeats_and_habit == pytest.approx(wanted, nan_ok=True)


def test_scores_that_are_no_numbers_are_not_ranked() -> None:
    options = {"model": "Mine", "topk": [2], "device": "cpu", "eval_args": {"mode": "full"}}
    collector = TargetCollector({"metrics": ["Hit"], **options})
    scores = torch.randn(3, 9)
    scores[1, 4] = torch.nan
    with pytest.raises(UsageError, match="^Mine: .*NaN"):
        collector.eval_batch_collect(scores, None, torch.arange(3), torch.tensor([1, 2, 3]))


@pytest.mark.parametrize("items", [5, 255, 3000])
@pytest.mark.parametrize("k", [1, 7])
@pytest.mark.parametrize("levels", [0, 2])
def test_best_items_are_those_of_a_sort(items: int, k: int, levels: int, monkeypatch) -> None:
    """In parts whose rests are groups of one, of all, and of columns that are left out; of equal
    scores, of which there are many where there are few levels, the lower ids."""
    monkeypatch.setattr(large_products, "PART", 2100)
    generator = torch.Generator().manual_seed(items)
    scores = torch.randn(9, items + 1, generator=generator)
    scores = (scores * levels).round() if levels else scores
    barred = torch.randint(9, (4 * items,), generator=generator)
    of_item = torch.randint(1, items + 1, (4 * items,), generator=generator)
    choice = Choice(torch.arange(1, items + 1))
    value, item = find_best_items(lambda some: scores[:, some], choice, k, (barred, of_item))
    scores[:, 0] = -torch.inf
    scores[barred, of_item] = -torch.inf
    want = [x[:, : min(k, items)] for x in scores.sort(dim=1, descending=True, stable=True)]
    np.testing.assert_array_equal(value, want[0].numpy())
    there = value > -np.inf
    np.testing.assert_array_equal(item[there], want[1].numpy()[there])
    row_scores = RowScores(lambda some: scores[:, some], choice.items, (barred, of_item))
    for rank, targets in enumerate(want[1].T.contiguous()):  # as an evaluation finds them
        expected = torch.where(torch.from_numpy(there[:, rank]), rank, items)
        assert torch.equal(row_scores.rank(targets), expected)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("PosSASRec", {"mask_history": True, "position": ["to_rope"], "topk": [5, 10]}),
        ("AttrFormer", {"eval_args": {"split": {"GT": [0.6, 0.8]}}}),
    ],
    ids=str,
)
def test_scores_in_parts_give_the_same_run(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, options: dict[str, Any]
) -> None:
    metrics = ["Hit", "NDCG", "MRR", "ItemCoverage", "AveragePopularity"]
    given = {**SMALL, "data_path": str(tiny), "epochs": 1, "metrics": metrics, **options}
    (tests, ranks), by_parts = ([], []), Mock(side_effect=products)
    monkeypatch.setattr(large_products, "products", by_parts)
    for part in (1 << 15, 5):
        monkeypatch.setattr(large_products, "PART", part)
        folder = tmp_path / str(part)
        tests.append(recbole_pos.run(model, "tiny", None, given, folder, verbose=False).test)
        ranks.append(pd.read_parquet(folder / "test_ranks.parquet"))
        assert by_parts.called == (part == 5)
    assert tests[1] == pytest.approx(tests[0], abs=1e-6)
    pd.testing.assert_frame_equal(*ranks)
    by_parts.reset_mock()  # a metric of all scores gets them
    given |= {"metrics": ["NDCG", "GAUC"], "valid_metric": "GAUC", "topk": [5]}
    found = recbole_pos.run(model, "tiny", None, given, tmp_path / "all", verbose=False).test
    assert "gauc" in found and not by_parts.called


@pytest.mark.parametrize(
    ("model", "options"),
    [("PosSASRec", {}), ("SASRec", {"augmentation": "prefix"}), ("BPR", {})],
    ids=str,
)
def test_popularity_counts_training(tmp_path: Path, model: str, options: dict[str, Any]) -> None:
    """Whatever rows a model trains on, and whatever ``target_events`` selects."""
    frame = make_log().assign(bought=lambda frame: (frame.index % 3 == 0).astype(int))
    selection = {
        "data_path": str(write_atomic(frame, tmp_path)),
        "target_events": {"bought": 1},
        "load_col": {"inter": ["user_id", "item_id", "timestamp", "bought"]},
        "metrics": ["AveragePopularity"],
        "valid_metric": "AveragePopularity@5",
        "topk": [5],
    }
    made = prepare(small(model, **selection, **options))
    made.trainer.fit(made.loaders["train"], saved=False, verbose=False)
    found = made.trainer.evaluate(made.loaders["test"], load_best_model=False)
    log = made.dataset.log
    counts = Counter(log.items[torch.from_numpy(made.dataset.part == 0)].tolist())
    recommended = made.trainer.eval_collector.last.get("rec.items").flatten().tolist()
    popularity = np.mean([counts[item] for item in recommended])
    assert found["averagepopularity@5"] == pytest.approx(popularity, abs=1e-6)


# --- metrics of one's own: as plain loops compute them, everywhere ---


DATASETS = Path(__file__).parent.parent / "dataset"
TOYSHOP = {
    **{"data_path": str(DATASETS), "epochs": 2, "hidden_size": 8, "inner_size": 8},
    **{"MAX_ITEM_LIST_LENGTH": 10, "load_col": {"inter": ["user_id", "item_id", "timestamp"]}},
}
TOYSHOP["load_col"] = {**TOYSHOP["load_col"], "item": ["item_id", "brand"]}


def same_brand(lists: Any, targets: Any, brand: Any) -> Any:
    """A hit within the same brand."""
    return (brand[lists] == brand[targets][:, None]).any(1)


def mean_rank(ranks: Any) -> float:
    return float(ranks.mean())


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register two metrics for a test; a process that trains for another cannot import them."""
    monkeypatch.setattr(plugins, "_allowed", plugins._allowed.copy())
    recbole_pos.register_metric("same_brand", same_brand)
    recbole_pos.register_metric("mean_rank", mean_rank, bigger=False)
    yield
    CUSTOM.clear()


def test_a_metric_is_there_for_everything(registered: None, tmp_path: Path) -> None:
    """Validation stops by it, the test has it, evaluate computes it again from the weights."""
    names = {"metrics": ["NDCG", "same_brand", "mean_rank"], "topk": [1, 5]}
    options = {**TOYSHOP, **names, "valid_metric": "same_brand@5"}
    folder = tmp_path / "run"
    run = recbole_pos.run("FPARec", "toyshop", None, options, run_dir=folder, verbose=False)
    computed = ["ndcg@1", "ndcg@5", "same_brand@1", "same_brand@5", "mean_rank"]
    assert list(run.test) == list(run.best_valid) == computed
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    scores = [json.loads(line)["valid"]["same_brand@5"] for line in lines]
    assert run.best_valid["same_brand@5"] == max(scores)

    experiment = recbole_pos.load(folder)
    experiment.trainer.evaluate(experiment.loaders["test"])
    found = experiment.trainer.eval_collector.last
    dataset = experiment.loaders["test"]._dataset
    brand = dataset.item_feat["brand"].tolist()
    hits = []
    for items, event in zip(found.get(ITEMS).tolist(), found.get(EVENT).tolist(), strict=True):
        wanted = brand[int(dataset.log.items[event])]
        hits.append(any(brand[item] == wanted for item in items[:5]))
    assert run.test["same_brand@5"] == pytest.approx(np.mean(hits), abs=1e-6)
    mean = float(found.get(RANK).double().mean()) + 1
    assert run.test["mean_rank"] == pytest.approx(mean, abs=1e-6)

    again = recbole_pos.evaluate(folder, metrics=["same_brand"], topk=[5])
    assert again == {"same_brand@5": run.test["same_brand@5"]}


def test_a_lower_value_may_be_better(registered: None) -> None:
    options = {**TOYSHOP, "metrics": ["mean_rank"], "valid_metric": "mean_rank"}
    assert not PosConfig("FPARec", "toyshop", None, options)["valid_metric_bigger"]


def test_other_processes_know_it(registered: None) -> None:
    packed = pack("FPARec")
    CUSTOM.clear()  # as in a process that has just started
    unpack(packed)
    assert CUSTOM["same_brand"].arguments == ["lists", "targets", "brand"]


def test_what_cannot_be_a_metric_is_refused(registered: None, tmp_path: Path) -> None:
    for name in ("ndcg", "hit at 5"):
        with pytest.raises(UsageError, match="register_metric: found the name"):
            recbole_pos.register_metric(name, mean_rank)
    recbole_pos.register_metric("by_price", lambda ranks, price: ranks)
    options = {**TOYSHOP, "metrics": ["NDCG", "by_price"]}
    with pytest.raises(UsageError, match="by_price asks for price, which is neither"):
        recbole_pos.run("FPARec", "toyshop", None, options, run_dir=tmp_path, verbose=False)
