"""Models of sessions: PosRec, FGNN and baselines; graphs, states and scores against loops."""

import math
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest
import reference_graph as reference
import torch
from conftest import write_atomic
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference_graph import SESSIONS
from scipy.sparse import csr_matrix
from shop import shaken

from recbole_pos.layers.graph import Anchors, SessionGraph, weigh_neighbours
from recbole_pos.layers.sequence_batch import SequenceBatch
from recbole_pos.model.baselines import find_reachable_items

CUT = {"eval_args": {"split": {"ST": [80, 100]}}}


def session_log() -> pd.DataFrame:
    """120 sessions of 1 to 9 events that overlap in time and in the file, with ties everywhere."""
    rng = np.random.default_rng(4)
    rows = []
    for session in range(120):
        begin, length = rng.integers(0, 400), rng.integers(1, 10)
        times = np.sort(begin + rng.integers(0, 40, length)) // 10
        items = rng.integers(0, 30, length)
        for item, time in zip(items, times, strict=True):
            rows.append((f"s{session}", f"e{item}", float(time)))
    frame = pd.DataFrame(rows, columns=["user_id", "item_id", "timestamp"])
    order = np.argsort(rng.random(len(frame)), kind="stable")
    return frame.iloc[order].reset_index(drop=True)


def file_phases(frame: pd.DataFrame) -> dict[str, str]:
    """The part of each session under ``CUT``, sessions in their order."""
    ends: dict[str, float] = {}
    for session, time in zip(frame.user_id, frame.timestamp, strict=True):
        ends[session] = max(ends.get(session, time), time)
    order = sorted(ends, key=ends.get)  # stable: ties keep the order of the file
    for bound in CUT["eval_args"]["split"]["ST"]:
        assert ends[order[bound - 1]] == ends[order[bound]], "no tie at a boundary"
    names = np.repeat(["train", "valid", "test"], [80, 20, len(order) - 100])
    return dict(zip(order, names.tolist(), strict=True))


N = 12
one_session = st.one_of(
    st.lists(st.integers(1, 5), min_size=1, max_size=N),  # many repeats
    st.lists(st.integers(1, 900), min_size=1, max_size=N),  # few
    st.lists(st.integers(1, 30), min_size=N, max_size=N),  # full length
    st.integers(1, N).map(lambda length: [7] * length),  # one item alone
)
many_sessions = st.lists(one_session, min_size=1, max_size=5)
# as long as sessions get, where shortest paths change stretches often
LONG = torch.randint(1, 40, (20, 50), generator=torch.Generator().manual_seed(0)).tolist()


def packed(many: list[list[int]]) -> SequenceBatch:
    lengths = torch.tensor([len(s) for s in many])
    items = torch.tensor([item for s in many for item in s])
    return SequenceBatch.from_lengths(items, lengths, max(N, *lengths.tolist()))


def nodes_of(graph: SessionGraph, row: int) -> dict[int, int]:
    """Item -> node of one session."""
    found = (graph.nodes.row == row).nonzero().squeeze(1).tolist()
    return {int(graph.nodes.items[node]): node for node in found}


@settings(max_examples=100, deadline=None)
@given(many_sessions, st.booleans())
@example(LONG, True)
@example([[3], [3] * 5, [4, 9, 2, 6], [1, 2, 3, 2, 4, 2, 3, 5]], True)
def test_messages_and_distances_of_anchors_equal_loops(many, with_anchors: bool) -> None:
    graph = SessionGraph.build(packed(many))
    anchors = Anchors.build(graph) if with_anchors else None
    found = weigh_neighbours(graph, graph.transitions, anchors)
    for row, events in enumerate(many):
        place = {i: int(graph.nodes.index[node]) for i, node in nodes_of(graph, row).items()}
        want = reference.message_weights(events, with_anchors)
        for side, weights in enumerate(want):
            expected = reference.matrix(weights, place, found.size(2))
            torch.testing.assert_close(found[row, side], expected)


def states(model, many: list[list[int]]) -> torch.Tensor:
    return model.encode(packed(many))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("PosRec", {}),
        ("PosRec", {"anchors": False, "lambda_2": 0.5}),
        ("PosRec", {"position": ["lpe2d"]}),  # reads the length of the session
        ("PosRec", {"graph_layers": 2, "lambda_0": 0.3, "n_layers": 2}),
        ("FGNN", {"graph_layers": 2, "n_heads": 1, "readout_steps": 1}),
        ("FGNN", {"graph_layers": 3, "n_heads": 2, "anchors": True}),
    ],
    ids=str,
)
def test_states_and_gradients_equal_the_equations(experiment, double, model: str, options) -> None:
    """Alone and in any batch; gradients of item vectors go through the graph, nothing is scored."""
    made = experiment(model, hidden_size=16, **options)
    net = shaken(made)
    found = states(net, SESSIONS)
    equations = reference.fgnn if model == "FGNN" else reference.posrec
    anchors = made.config["anchors"]
    want = torch.stack([equations(net, session, anchors) for session in SESSIONS])
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)
    weight, params = torch.randn_like(want), list(net.parameters())
    sums = ((states * weight).sum() for states in (found, want))
    grads = (torch.autograd.grad(total, params, allow_unused=True) for total in sums)
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
    for row, session in enumerate(SESSIONS):
        torch.testing.assert_close(states(net, [session])[0], found[row])


@pytest.mark.parametrize("name", ["PosRec", "FGNN"])
def test_prefix_windows_give_the_loss_of_recboles_rows(experiment, name: str) -> None:
    """Each training target once, with what is before it; scores are products (equation 11)."""
    made = experiment(name, MAX_ITEM_LIST_LENGTH=5, hidden_size=16)
    model = made.model.double().eval()
    loader = made.trainer.training_loader(made.loaders["train"])
    sizes = [len(batch) for batch in loader]
    assert sum(sizes) == loader.num_targets == len(made.loaders["train"]._dataset)
    assert 14 <= min(sizes) <= max(sizes) <= 16  # train_batch_size counts prefixes
    total = sum(model.window_loss(batch) * len(batch) for batch in loader) / loader.num_targets
    rows = made.loaders["train"]._dataset[np.arange(loader.num_targets)]
    torch.testing.assert_close(total, model.calculate_loss(rows), rtol=1e-9, atol=1e-9)
    scores, table = model.full_sort_predict(rows[:20]), model.item_embedding.weight
    for row in range(20):
        session = rows["item_id_list"][row, : int(rows["item_length"][row])].tolist()
        torch.testing.assert_close(scores[row], states(model, [session])[0] @ table.T)


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_atomic(session_log(), tmp_path_factory.mktemp("sessions")))


def list_sessions(frame: pd.DataFrame, phase: str) -> list[list[str]]:
    """The items of each session of a phase, in their order."""
    phases, ordered = file_phases(frame), frame.sort_values("timestamp", kind="stable")
    groups = ordered.groupby("user_id")
    return [group.item_id.tolist() for name, group in groups if phases[name] == phase]


def ranked(made: Any, phase: str) -> list[tuple[list[str], str, list[str]]]:
    """(history, target, all items, best first) of every row a model is tested on."""
    items = made.dataset.field2id_token["item_id"]
    found = []
    for rows, _, _, target in made.loaders[phase]:
        with torch.inference_mode():
            scores = made.model.eval().full_sort_predict(rows)
        order = 1 + scores[:, 1:].argsort(dim=1, descending=True, stable=True)
        histories = zip(rows["item_id_list"].numpy(), rows["item_length"], strict=True)
        for (history, length), item, best in zip(histories, target, order.numpy(), strict=True):
            found.append((list(items[history[:length]]), items[item], list(items[best])))
    return found


def test_session_popularity_counts_in_loops(experiment, sessions: str) -> None:
    frame = session_log()
    overall = Counter(item for items in list_sessions(frame, "train") for item in items)
    first = {item: n for n, item in enumerate(dict.fromkeys(frame.item_id))}
    made = experiment("SPop", data_path=sessions, **CUT)
    rows = ranked(made, "test")
    tested = list_sessions(frame, "test")
    want = [(items[:n], items[n]) for items in tested for n in range(1, len(items))]
    assert sorted((history, target) for history, target, _ in rows) == sorted(want)
    for history, _, best in rows:
        seen = Counter(history)
        assert best == sorted(first, key=lambda i: (-seen[i], -overall[i], first[i]))


def test_neighbours_in_loops(experiment, sessions: str) -> None:
    k, shrink = 4, 1.5
    sets = [set(items) for items in list_sessions(session_log(), "train")]
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


def test_transitions_in_loops(experiment, sessions: str) -> None:
    """By the fewest transitions first, of equally many by the probability of a random walk."""
    k, hops = 12, 3
    ordered = session_log().sort_values("timestamp", kind="stable")
    whole = [group.item_id.tolist() for _, group in ordered.groupby("user_id")]
    histories = [items[: -min(2, len(items) - 2) or None] for items in whole]  # leave-one-out
    pairs = [pair for items in histories for pair in pairwise(items)]
    counts = Counter((a, b) for a, b in pairs if a != b)
    total = Counter(a for a, _ in counts.elements())
    step: dict[str, dict[str, float]] = defaultdict(dict)
    for (a, b), count in counts.items():
        step[a][b] = count / total[a]
    made = experiment("TransitionGraph", data_path=sessions, k=k, hops=hops)
    for history, _, best in ranked(made, "test"):
        score: dict[str, float] = {}
        walk, reached = {history[-1]: 1.0}, {history[-1]}
        for hop in range(1, hops + 1):
            following: dict[str, float] = defaultdict(float)
            for a, share in walk.items():
                for b, chance in step[a].items():
                    following[b] += share * chance
            walk = following
            new = walk.keys() - reached
            score |= {b: hops - hop + walk[b] for b in new}
            reached |= new
        want = sorted(score.values(), reverse=True)[:k]
        assert [score.get(b, 0.0) for b in best[: len(want)]] == pytest.approx(want)
    graph = csr_matrix(np.array([[0, 0, 0, 0], [0, 0, 1, 3], [0, 0, 0, 0], [0, 2, 0, 0]]))
    items, scores = find_reachable_items(graph, 3, 2, max_cells=1)
    assert items.tolist() == [[0, 0, 0], [3, 2, 0], [0, 0, 0], [1, 2, 0]]
    assert scores.tolist() == [[0, 0, 0], [1.75, 1.25, 0], [0, 0, 0], [2, 0.25, 0]]


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
    users = experiment("FPMC", data_path=sessions, **CUT)
    users.model.load_state_dict(made.model.state_dict(), strict=False)
    users.model.UI_emb.weight.data.zero_()  # RecBole's with nothing known of users
    rows = next(iter(made.loaders["test"]))[0]
    models = (made.model, users.model)
    torch.testing.assert_close(*(model.full_sort_predict(rows) for model in models))
    torch.testing.assert_close(*(model.predict(rows) for model in models))
