"""Why an item is recommended: every change against two requests, in files, HTTP and a picture."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from schemes import shake

from recbole_pos.cli.main import main
from recbole_pos.errors import UsageError
from recbole_pos.layers import large_products
from recbole_pos.serve import explain
from recbole_pos.serve.http import RecommendBody, recommend
from recbole_pos.serve.recommender import Recommender

L = 12  # MAX_ITEM_LIST_LENGTH of small models
AT = 3e5


@pytest.fixture
def recommender(experiment: Callable) -> Callable[..., Recommender]:
    def build(model: str, **options: Any) -> Recommender:
        made = experiment(model, **options)
        made.model.eval()
        shake(made.model)
        return Recommender(made)

    return build


def histories() -> list[dict[str, Any]]:
    """Shorter and longer than the window, with items twice, unknown ones, one, and nothing."""
    rng = np.random.default_rng(0)
    rows = []
    for n, length in enumerate((5, 30, 1, 12, 0, 2)):
        items = [f"i{i}" for i in rng.integers(0, 25, length)]
        times = np.sort(rng.integers(0, 200_000, length)).tolist()
        rows.append({"id": n, "items": items, "times": times})
    rows[0]["items"][1] = "never heard of"
    rows[3]["items"][-1] = rows[3]["items"][0]
    return rows


def in_loops(
    trained: Recommender, history: dict[str, Any], items: list[str], hide: bool, **more: Any
) -> dict[str, list[tuple[str, float, float]]]:
    """By item, of each interaction, the newest first, what is added to score and rank without it:
    by requests of one history each."""
    seen = history["items"] if hide else []
    given = {"k": len(trained.items), "exclude_seen": False, "excluded": seen, **more}

    def ask(kept: list[int]) -> pd.DataFrame:
        rest = {key: [history[key][n] for n in kept] for key in ("items", "times")}
        table = trained.recommend(histories=[rest], **given).set_index("item")
        return table.loc[items, ["score", "rank"]]

    every = range(len(history["items"]))
    known = [n for n in every if history["items"][n] in trained.ids]
    whole, changes = ask(known), {item: [] for item in items}
    for left_out in known[::-1]:
        rest = [n for n in known if n != left_out]
        change = (ask(rest) if rest else np.nan) - whole
        for item in items:
            changes[item].append((history["items"][left_out], *change.loc[item]))
    return changes


def reasons_of(row: dict[str, Any]) -> list[tuple[str, float, float]]:
    """The past item, score change and rank change of each reason of a recommendation."""
    names = ("because", "score_change", "rank_change")
    found = [tuple(row.get(f"{name}_{n}") for name in names) for n in range(1, 41)]
    return [reason for reason in found if pd.notna(reason[0])]


@pytest.mark.parametrize(
    ("model", "options", "hide"),
    [
        ("PosSASRec", {"position": ["to_rope", "learned"]}, False),
        ("PosSASRec", {"position": ["hstu"], "request_time": "target"}, True),
        ("AttrFormer", {"inference_relations": "own", "prior_weight": 0.0}, False),
        ("SASRec", {}, True),
        ("SessionKNN", {}, True),  # the newest alone counts, and most scores are equal
    ],
    ids=str,
)
def test_changes_are_those_of_two_requests(
    recommender: Callable, monkeypatch: pytest.MonkeyPatch, model: str, options: dict, hide: bool
) -> None:
    """Of many histories at once, of one whose parts do not fit a batch, over parts of items."""
    monkeypatch.setattr(explain, "BATCH", 7)
    monkeypatch.setattr(large_products, "PART", 9)
    trained, rows = recommender(model, **options), histories()
    more = {"boosts": {"i3": 0.1}, **({"at": AT} if options.get("request_time") else {})}
    asked = {"k": 3, "exclude_seen": hide, **more}
    found = trained.recommend(histories=rows, because=40, **asked)
    plain = trained.recommend(histories=rows, **asked)
    pd.testing.assert_frame_equal(found[["id", "rank", "item", "score", "by"]], plain)
    wanted = {
        n: in_loops(trained, rows[n], table["item"].tolist(), hide, **more)
        for n, table in found[found["by"] == "model"].groupby("id")
    }
    for one in found.to_dict("records"):
        reasons = reasons_of(one)
        if one["by"] == "popularity":
            assert not reasons
            continue
        want = wanted[one["id"]][one["item"]]
        if trained.scorer.reach is not None:
            assert all(abs(change) < 1e-5 for _, change, _ in want[L:])
            want = want[:L]
        if len(want) == 1:  # without its only interaction there is nothing to ask with
            ((past, *changes),) = reasons
            assert past == want[0][0] and pd.isna(changes).all()
            continue
        carried = sorted((x for x in want if x[1] < -1e-5), key=lambda x: x[1])
        assert [(x[0], x[2]) for x in reasons[: len(carried)]] == [(x[0], x[2]) for x in carried]
        scores = [x[1] for x in carried]
        np.testing.assert_allclose([x[1] for x in reasons][: len(scores)], scores, 1e-3, 2e-5)
        assert all(-2e-5 < score < 0 for _, score, _ in reasons[len(carried) :])


def test_every_interaction_is_explained(recommender: Callable) -> None:
    trained, row = recommender("PosSASRec", position=["rope"]), histories()[3]
    items = ["i30", "i31"]
    found = trained.explain(row, items, exclude_seen=False)
    assert len(found) == 2 * L and found["item"].drop_duplicates().tolist() == items
    for _, table in found.groupby("item"):
        assert table["score_change"].is_monotonic_increasing
        assert sorted(table["steps_back"]) == list(range(1, L + 1))
    best = trained.recommend(histories=[row], k=4)
    assert trained.explain(row, k=4)["item"].drop_duplicates().tolist() == best["item"].tolist()
    user = trained.dataset.field2id_token["user_id"][5]
    assert set(trained.explain(user=user)["steps_back"]) <= set(range(1, L + 1))
    refused: list[tuple[dict, str]] = [
        ({"history": row, "user": user}, "give a history or a user"),
        ({"history": []}, "history:"),
        ({"history": row, "items": ["no such item"]}, "item 'no such item'"),
        ({"history": row, "items": row["items"][:1], "exclude_seen": True}, "items:"),
    ]
    for given, message in refused:
        with pytest.raises(UsageError, match=f"^{message}"):
            trained.explain(**given)


def test_models_without_histories_are_refused(recommender: Callable) -> None:
    for model, options in (("Pop", {}), ("AttrFormer", {"prior_weight": 0.0})):
        trained = recommender(model, **options)
        with pytest.raises(UsageError, match="^because:"):
            trained.recommend(because=1)
    with pytest.raises(UsageError, match="^because:"):
        trained.recommend(histories=[["i1"]], because=-1)


def test_over_http_it_is_a_list(recommender: Callable) -> None:
    trained, rows = recommender("PosSASRec", position=["rope"]), histories()
    table = trained.recommend(histories=rows, k=2, because=2).to_dict("records")
    answers = recommend(trained, RecommendBody(histories=rows, k=2, because=2))
    found = [reasons for answer in answers for reasons in answer.model_dump()["because"]]
    for row, reasons in zip(table, found, strict=True):
        expected = reasons_of(row)
        assert [reason["item"] for reason in reasons] == [item for item, _, _ in expected]
        changes = [reason["score_change"] for reason in reasons]
        np.testing.assert_allclose(np.array(changes, float), [x[1] for x in expected])


@pytest.mark.slow
def test_reasons_are_kept_and_drawn(trained: Callable[..., Path], tmp_path: Path, capsys) -> None:
    run_dir = trained("PosSASRec")
    out = tmp_path / "found.parquet"
    asked = ["--users", "u7", "u9", "-k", "4", "--because", "2", "--out", out]
    assert main(["recommend", str(run_dir), *map(str, asked)]) == 0
    names = ["because_1", "steps_back_1", "score_change_1", "rank_change_1"]
    assert list(pd.read_parquet(out))[5:9] == names
    capsys.readouterr()
    assert main(["inspect", "because", str(run_dir), "--user", "u9"]) == 0
    assert "score_change" in capsys.readouterr().out
    assert (run_dir / "because.png").stat().st_size > 10_000
    command = ["inspect", "because", str(run_dir), "--history"]
    assert main([*command, "i1", "no-such", "i2"]) == 0
    assert "--history: 1 of 3 names are of no item" in " ".join(capsys.readouterr().out.split())
    assert main([*command, "i1"]) == 2
