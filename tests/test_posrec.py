"""PosRec and FGNN: equations against loops, invariances, training from prefixes."""

from __future__ import annotations

import numpy as np
import pytest
import reference_graph as reference
import torch
from reference_graph import SESSIONS

from recbole_pos.errors import UsageError
from recbole_pos.layers.context import SequenceContext


def packed(sessions: list[list[int]]) -> tuple[torch.Tensor, SequenceContext]:
    lengths = torch.tensor([len(s) for s in sessions])
    items = torch.tensor([item for s in sessions for item in s])
    return items, SequenceContext.from_lengths(lengths, 12)


def states(model, sessions: list[list[int]]) -> torch.Tensor:
    items, ctx = packed(sessions)
    return model.states(items, ctx, ctx.last)


def shaken(made):
    """The model in float64 with weights far from their start."""
    model = made.model.double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.4)
    return model


def expected(made, model, session: list[int]) -> torch.Tensor:
    anchors, overlap = made.config["anchors"], made.config["anchor_overlap"]
    if made.config["model"] == "FGNN":
        return reference.fgnn(model, session, anchors, overlap)
    given = {
        "with_anchors": anchors,
        "overlap": overlap,
        "self_weight": made.config["anchor_self_weight"],
        "mean": made.config["messages"] == "mean",
    }
    return reference.posrec(model, session, given)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("PosRec", {}),
        ("PosRec", {"anchors": False, "messages": "mean", "lambda_2": 0.5}),
        ("PosRec", {"anchor_overlap": "sum", "anchor_self_weight": 0.5, "graph_layers": 2}),
        ("PosRec", {"anchor_overlap": "edge", "messages": "mean", "lambda_0": 0.3, "n_layers": 2}),
        ("FGNN", {}),
        ("FGNN", {"graph_layers": 2, "n_heads": 1, "readout_steps": 1}),
        ("FGNN", {"graph_layers": 3, "n_heads": 2, "anchors": True}),
        ("FGNN", {"anchors": True, "anchor_overlap": "sum"}),
    ],
    ids=str,
)
def test_states_and_gradients_equal_the_equations(
    experiment, double, model: str, options: dict
) -> None:
    """Alone and in any batch; gradients of item vectors go through the graph, nothing is scored."""
    sizes = {"hidden_size": 16} if model == "FGNN" else {}
    made = experiment(model, **sizes, **options)
    net = shaken(made)
    found = states(net, SESSIONS)
    want = torch.stack([expected(made, net, session) for session in SESSIONS])
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)
    weight, params = torch.randn_like(want), list(net.parameters())
    grads = (
        torch.autograd.grad((x * weight).sum(), params, allow_unused=True) for x in (found, want)
    )
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(states(net, SESSIONS[::-1]).flip(0), found)
    for row, session in enumerate(SESSIONS):
        torch.testing.assert_close(states(net, [session])[0], found[row])


def test_self_loops_by_hand(experiment) -> None:
    """4 4 4 6 4: item 4 follows itself twice, item 6 never; no other edge is made up."""
    sessions = packed([[4, 4, 4, 6, 4], [1, 2, 3]])
    model = experiment("FGNN", hidden_size=16).model
    plain = model.weights(*model.graphs(*sessions)).tolist()
    assert plain[0] == [[2, 1, 0], [1, 1, 0], [0, 0, 1]]  # rows receive; the third is padding
    assert plain[1] == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]


@pytest.mark.parametrize("position", ["spe2d", "lpe2d"])
def test_encodings_get_the_length_of_the_session(experiment, monkeypatch, position: str) -> None:
    """Not what lies before and after a node, which is less where its item comes again."""
    model = shaken(experiment("PosRec", position=[position]))
    (scheme,), seen = model.position_embedding, []
    rows = scheme.rows
    monkeypatch.setattr(scheme, "rows", lambda *given: seen.append(given) or rows(*given))
    states(model, SESSIONS)
    assert seen[0][2].tolist() == [len(s) for s in SESSIONS for _ in set(s)]


@pytest.mark.parametrize("name", ["PosRec", "FGNN"])
def test_prefix_windows_give_the_loss_of_recboles_rows(experiment, name: str) -> None:
    """Each training target once, with what is before it; scores are products (equation 11)."""
    made = experiment(name, MAX_ITEM_LIST_LENGTH=5, hidden_size=16)
    model = made.model.double().eval()
    loader = made.trainer.training_loader(made.loaders["train"])
    sizes = [len(batch) for batch in loader]
    assert sum(sizes) == loader.targets == len(made.loaders["train"]._dataset)
    assert max(sizes) <= 16 and min(sizes) >= 14  # train_batch_size counts prefixes
    total = sum(model.window_loss(batch) * len(batch) for batch in loader) / loader.targets
    rows = made.loaders["train"]._dataset[np.arange(loader.targets)]
    torch.testing.assert_close(total, model.calculate_loss(rows), rtol=1e-9, atol=1e-9)
    scores, table = model.full_sort_predict(rows[:20]), model.item_embedding.weight
    for row in range(20):
        session = rows["item_id_list"][row, : int(rows["item_length"][row])].tolist()
        torch.testing.assert_close(scores[row], states(model, [session])[0] @ table.T)
    wanted = scores[torch.arange(20), rows["item_id"][:20]]
    torch.testing.assert_close(model.predict(rows[:20]), wanted)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("PosRec", {"position": ["ldpe", "rope"]}, "^position: .*rope"),
        ("PosRec", {"position": ["time_learned"]}, "^position: .*time_learned"),
        ("PosRec", {"train_windows": "chunk"}, "^train_windows: PosRec"),
        ("FGNN", {"train_windows": "chunk"}, "^train_windows: FGNN"),
    ],
)
def test_bad_options(experiment, model: str, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        made = experiment(model, **{"hidden_size": 16, **options})
        made.trainer.training_loader(made.loaders["train"])


def test_states_of_several_positions_are_refused(experiment) -> None:
    items, ctx = packed(SESSIONS)
    with pytest.raises(ValueError, match="24 positions of 6 sessions"):
        experiment("PosRec").model.states(items, ctx, None)
