"""The approximate index of items: its recall, what stays out of lists, and when it is built."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import uvicorn
from conftest import SMALL, write_atomic

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config.arguments import IndexArguments
from recbole_pos.errors import UsageError
from recbole_pos.layers.large_products import Choice
from recbole_pos.serve import item_index
from recbole_pos.serve.recommender import Recommender

pytest.importorskip("faiss")
ITEMS, USERS = 2_000, 70
EXACT = IndexArguments("faiss", 1.0)
LOW = IndexArguments("faiss", 0.2)


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Path:
    """data_path of a dataset with few interactions and many items, which have a file."""
    rng = np.random.default_rng(0)
    user = np.repeat(np.arange(USERS), 9)
    columns = {
        "user_id": [f"u{n}" for n in user],
        "item_id": [f"i{n}" for n in rng.integers(0, ITEMS, len(user))],
        "timestamp": np.arange(len(user)),
    }
    folder = write_atomic(pd.DataFrame(columns), tmp_path_factory.mktemp("shop"), "shop")
    items = pd.DataFrame({"item_id:token": [f"i{n}" for n in range(ITEMS)], "price:float": 1.0})
    items.to_csv(folder / "shop" / "shop.item", sep="\t", index=False)
    return folder


@pytest.fixture
def run(shop: Path, tmp_path: Path) -> Path:
    columns = {"inter": ["user_id", "item_id", "timestamp"], "item": ["item_id", "price"]}
    options = {**SMALL, "data_path": str(shop), "load_col": columns, "epochs": 1}
    recbole_pos.run("PosSASRec", "shop", None, options, run_dir=tmp_path / "run", verbose=False)
    return tmp_path / "run"


def assert_same(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    assert list(found["item"]) == list(expected["item"])
    assert list(found["id"]) == list(expected["id"])
    assert found["score"].to_numpy() == pytest.approx(expected["score"].to_numpy(), abs=1e-5)


def test_recall_is_measured_against_all_items() -> None:
    """On clustered vectors; what other histories get has the recall that was chosen."""
    rng, d = np.random.default_rng(0), 16
    centres = rng.normal(size=(20, d))
    vectors = centres[rng.integers(0, 20, 4_001)] + 0.7 * rng.normal(size=(4_001, d))
    vectors = vectors.astype(np.float32)
    states = torch.from_numpy(centres[rng.integers(0, 20, 400)] + 0.7 * rng.normal(size=(400, d)))
    states = states.float()
    index = item_index.ItemIndex(vectors, *item_index.cluster_items(vectors))
    index.measure_recall(states[:200], torch.from_numpy(vectors))
    index.choose_probes(0.95)
    assert 0.95 <= index.recall < 1 and 13 < index.num_probes < len(index.centroids) / 2

    scores = states[200:].numpy() @ vectors[1:].T
    best = 1 + np.argsort(-scores, 1)[:, :100]
    nobody = torch.zeros(0, dtype=torch.int64)
    choice = Choice(torch.arange(1, 4_001))
    found_scores, found = index.find_best(states[200:], 100, choice, (nobody, nobody))
    recall = np.mean([len(set(a) & set(b)) / 100 for a, b in zip(best, found, strict=True)])
    assert recall == pytest.approx(index.recall, abs=0.02)
    expected = np.take_along_axis(scores, found - 1, 1)  # scores are exact, best first
    np.testing.assert_allclose(found_scores, expected, atol=1e-4)
    assert (np.diff(found_scores) <= 0).all()


def test_with_all_lists_it_is_the_exact_search(run: Path) -> None:
    exact, approximate = Recommender.load(run), Recommender.load(run)
    text = item_index.use_index(approximate, EXACT)
    assert "179 of 179 lists" in text and "recall@100 1.0000" in text
    excluded = [f"i{n}" for n in range(300)]
    for options in (
        {"exclude_seen": True},
        {"exclude_seen": False, "k": 100},
        {"excluded": excluded},
        {"allowed": excluded},  # few items: all are scored
        {"boosts": {"i5": 3.0}},  # the index knows no boosts
        {"k": 150},  # longer than the lists by which recall is measured
    ):
        assert_same(approximate.recommend(**options), exact.recommend(**options))
    histories = [{"items": ["i1", "i2"], "allowed": ["i7", "i8"]}, {"items": ["i1"]}, []]
    assert_same(approximate.recommend(histories=histories), exact.recommend(histories=histories))


def test_scores_that_are_no_numbers_are_an_error(run: Path) -> None:
    trained = Recommender.load(run)
    item_index.use_index(trained, LOW)
    for parameter in trained.model.trm_encoder.parameters():
        parameter.detach().fill_(torch.nan)
    with pytest.raises(UsageError, match="scores of the model are not numbers"):
        trained.recommend(histories=[["i1"]])


def test_seen_and_excluded_items_stay_out(run: Path) -> None:
    """Also with few lists, which are more where they hold too few items."""
    trained = Recommender.load(run)
    item_index.use_index(trained, LOW)
    index = trained.scorer.index
    assert index.num_probes < len(index.centroids) / 3
    excluded = {f"i{n}" for n in range(0, ITEMS, 3)}
    found = trained.recommend(k=90, exclude_seen=True, excluded=excluded)
    assert len(found) == 90 * USERS and not excluded & set(found["item"])
    assert not found.duplicated(["id", "item"]).any()
    log = trained.dataset.log
    for user, table in found.groupby("id"):
        row = trained.dataset.field2token_id["user_id"][user]
        seen = log.items[log.offsets[row] : log.offsets[row] + log.lengths[row]]
        assert not set(trained.items[seen - 1]) & set(table["item"])


def test_the_index_is_built_once_a_model(run: Path, monkeypatch) -> None:
    """And not read after a change of the weights."""
    built = []
    cluster = item_index.cluster_items
    monkeypatch.setattr(item_index, "cluster_items", lambda x: built.append(1) or cluster(x))
    first = Recommender.load(run)
    text = item_index.use_index(first, LOW)
    size = (run / item_index.FILE).stat().st_size
    assert len(built) == 1 and size < 40_000  # without the vectors
    again = Recommender.load(run, histories_only=True)
    assert item_index.use_index(again, LOW) == text and len(built) == 1
    assert_same(again.recommend(histories=[["i1"]]), first.recommend(histories=[["i1"]]))

    checkpoint = torch.load(run / "checkpoint.pt", weights_only=True)
    torch.save({**checkpoint, "another": 1}, run / "checkpoint.pt")
    item_index.use_index(Recommender.load(run, histories_only=True), LOW)  # reads the dataset
    assert len(built) == 2


def test_commands(run: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    words = ["recommend", str(run), "-k", "5", "--index", "faiss", "--index_recall", "0.9"]
    assert main([*words, "--out", str(tmp_path / "one.parquet")]) == 0
    assert "index: " in capsys.readouterr().out
    parts = [*words, "--out", str(tmp_path / "parts"), "--part_rows", "20"]
    assert main([*parts, "--workers", "2"]) == 0
    table = pd.read_parquet(tmp_path / "one.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "parts"), table)

    apps: list = []
    monkeypatch.setattr(uvicorn, "run", lambda app, **_: apps.append(app))
    monkeypatch.setattr("recbole_pos.serve.http.make_app", lambda trained, *_: trained)
    assert main(["serve", str(run), "--index", "faiss"]) == 0
    assert apps[0].scorer.index.recall >= 0.99


def test_what_is_refused(run: Path, trained, refused) -> None:
    refused(["recommend", trained("BPR"), "--index", "faiss"], "does not score by products")
    refused(["recommend", run, "--index", "annoy"], "index: expected faiss")
