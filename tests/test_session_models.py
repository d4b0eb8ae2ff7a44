"""Baselines for sessions: scores by hand and in loops, runs, and what they do not look up."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import write_atomic
from scipy.sparse import csr_matrix
from session_logs import CUT, file_phases, session_log

from recbole_pos.model.session_baselines import find_nearest_items


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_atomic(session_log(), tmp_path_factory.mktemp("sessions")))


def prefixes(frame: pd.DataFrame, phase: str) -> list[tuple[list[str], str]]:
    """(items before, item) of every target of a phase."""
    phases, found = file_phases(frame), []
    for session, group in frame.sort_values("timestamp", kind="stable").groupby("user_id"):
        items = group.item_id.tolist()
        if phases[session] == phase:
            found += [(items[:n], items[n]) for n in range(1, len(items))]
    return found


def training_items(frame: pd.DataFrame) -> list[list[str]]:
    """The items of each training session."""
    phases, found = file_phases(frame), defaultdict(list)
    for session, item in zip(frame.user_id, frame.item_id, strict=True):
        if phases[session] == "train":
            found[session].append(item)
    return list(found.values())


def ranked(made: Any, phase: str) -> list[tuple[list[str], str, list[str]]]:
    """(history, target, all items, best first) of every row a model is tested on."""
    items = made.dataset.field2id_token["item_id"]
    found = []
    made.model.eval()
    for rows, _, _, target in made.loaders[phase]:
        with torch.inference_mode():
            scores = made.model.full_sort_predict(rows)
        order = 1 + scores[:, 1:].argsort(dim=1, descending=True, stable=True)
        for history, length, item, best in zip(
            rows["item_id_list"].numpy(), rows["item_length"], target, order.numpy(), strict=True
        ):
            found.append((list(items[history[:length]]), items[item], list(items[best])))
    return found


def test_session_popularity_counts_in_loops(experiment, sessions: str) -> None:
    frame = session_log()
    overall = Counter(item for items in training_items(frame) for item in items)
    first = {item: n for n, item in enumerate(dict.fromkeys(frame.item_id))}
    made = experiment("SPop", data_path=sessions, **CUT)
    rows = ranked(made, "test")
    assert sorted((h, t) for h, t, _ in rows) == sorted(prefixes(frame, "test"))
    for history, _, best in rows:
        seen = Counter(history)
        assert best == sorted(first, key=lambda i: (-seen[i], -overall[i], first[i]))


def test_neighbours_in_loops(experiment, sessions: str) -> None:
    k, shrink = 4, 1.5
    sets = [set(items) for items in training_items(session_log())]
    support = Counter(item for items in sets for item in items)
    together = Counter((a, b) for items in sets for a in items for b in items if a != b)
    made = experiment("SessionKNN", data_path=sessions, k=k, shrink=shrink, **CUT)
    for history, _, best in ranked(made, "test"):
        last = history[-1]
        score = {
            b: together[last, b] / (math.sqrt(support[last] * support[b]) + shrink)
            for b in support
            if together[last, b]
        }
        want = sorted(score.values(), reverse=True)[:k]
        assert [score.get(b, 0.0) for b in best[: len(want)]] == pytest.approx(want)
    events = csr_matrix(np.array([[0, 3, 1, 0], [0, 0, 1, 1]]))  # fewer than asked for
    items, values = find_nearest_items(events, 3, 0.0)
    assert items.tolist() == [[0, 0, 0], [2, 0, 0], [1, 3, 0], [2, 0, 0]]
    assert values[2].tolist() == pytest.approx([2**-0.5, 2**-0.5, 0])


def test_a_session_is_the_mean_of_its_items(experiment, sessions: str) -> None:
    made = experiment("SessionBPR", data_path=sessions, **CUT)
    vectors = made.model.item_embedding.weight.detach().numpy()
    rows = next(iter(made.loaders["test"]))[0]
    scores = made.model.full_sort_predict(rows).detach().numpy()
    for row in range(len(rows)):
        history = rows["item_id_list"][row, : rows["item_length"][row]].numpy()
        want = vectors @ vectors[history].mean(axis=0)
        np.testing.assert_allclose(scores[row], want, rtol=1e-4, atol=1e-7)


def test_fpmc_without_users(experiment, sessions: str) -> None:
    made = experiment("SessionFPMC", data_path=sessions, **CUT)
    names = {name for name, _ in made.model.named_parameters()}
    assert names == {"LI_emb.weight", "IL_emb.weight"}
    users = experiment("FPMC", data_path=sessions, **CUT)
    users.model.load_state_dict(made.model.state_dict(), strict=False)
    users.model.UI_emb.weight.data.zero_()  # RecBole's with nothing known of users
    rows = next(iter(made.loaders["test"]))[0]
    torch.testing.assert_close(
        made.model.full_sort_predict(rows), users.model.full_sort_predict(rows)
    )
    torch.testing.assert_close(made.model.predict(rows), users.model.predict(rows))
