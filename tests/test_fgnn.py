"""FGNN: its layers against loops, invariances, training from prefixes, options."""

from __future__ import annotations

import pytest
import reference_graph as reference
import torch
from steps import learn
from test_posrec import SESSIONS, packed, shaken, states

from recbole_pos.errors import UsageError

SMALL = {"hidden_size": 16}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"graph_layers": 2, "n_heads": 1, "readout_steps": 1},
        {"graph_layers": 3, "n_heads": 2, "anchors": True},
        {"anchors": True, "anchor_overlap": "edge"},
        {"anchors": True, "anchor_overlap": "sum"},
    ],
    ids=str,
)
def test_states_equal_loops(experiment, double, options: dict) -> None:
    made = experiment("FGNN", **SMALL, **options)
    model = shaken(made)
    found = states(model, SESSIONS)
    for row, session in enumerate(SESSIONS):
        anchored = made.config["anchors"], made.config["anchor_overlap"]
        want = reference.fgnn(model, session, *anchored)
        torch.testing.assert_close(found[row], want, rtol=1e-9, atol=1e-9)


def test_self_loops_by_hand(experiment) -> None:
    """4 4 4 6 4: item 4 follows itself twice, item 6 never; no other edge is made up."""
    sessions = packed([[4, 4, 4, 6, 4], [1, 2, 3]])
    model = experiment("FGNN", **SMALL).model
    plain = model.weights(*model.graphs(*sessions)).tolist()
    assert plain[0] == [[2, 1, 0], [1, 1, 0], [0, 0, 1]]  # rows receive; the third is padding
    assert plain[1] == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    model = experiment("FGNN", anchors=True, **SMALL).model
    anchored = model.weights(*model.graphs(*sessions)).tolist()
    assert anchored[1] == [[1, 0, 0], [1, 1, 0], [2, 1, 1]]  # the first item sends to all


@pytest.mark.parametrize("anchors", [False, True])
def test_a_session_scores_alike_alone_and_in_a_batch(experiment, double, anchors: bool) -> None:
    model = shaken(experiment("FGNN", anchors=anchors, **SMALL))
    together = states(model, SESSIONS)
    assert not torch.allclose(together[0], together[3])
    for row, session in enumerate(SESSIONS):
        torch.testing.assert_close(states(model, [session])[0], together[row])
    turned = states(model, SESSIONS[::-1])
    torch.testing.assert_close(turned.flip(0), together)


def test_the_weight_of_an_edge_counts(experiment, double) -> None:
    model = shaken(experiment("FGNN", **SMALL))
    one, two = states(model, [[1, 2, 3, 1, 2], [1, 2, 3, 1]])  # the edge 1 2 twice, or once
    assert (one - two).abs().max() > 1e-3


def test_prefix_windows_give_the_loss_of_recboles_rows(experiment) -> None:
    made = experiment("FGNN", MAX_ITEM_LIST_LENGTH=5, **SMALL)
    model = made.model.double().eval()
    loader = made.trainer.training_loader(made.loaders["train"])
    assert type(loader).__name__ == "WindowLoader"
    total = sum(model.window_loss(batch) * len(batch) for batch in loader) / loader.targets
    rows = made.loaders["train"]._dataset[list(range(loader.targets))]
    torch.testing.assert_close(total, model.calculate_loss(rows), rtol=1e-9, atol=1e-9)
    scores = model.full_sort_predict(rows)
    torch.testing.assert_close(
        scores, model(rows["item_id_list"], rows["item_length"]) @ model.item_embedding.weight.T
    )


def test_one_batch_is_learnt_and_gradients_are_finite(experiment) -> None:
    made = experiment("FGNN", learning_rate=0.01, **SMALL)
    batch = next(iter(made.trainer.training_loader(made.loaders["train"])))
    made.model.window_loss(batch).backward()
    for name, p in made.model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.any(), name
    losses = learn(made.trainer, made.model.window_loss, batch, 300)
    assert losses[-1] < 0.1 < 3 < losses[0]


def test_scalable_cross_entropy_is_exact_with_buckets_of_everything(experiment) -> None:
    whole = {"loss_type": "SCE", "bucket_size_x": 10**6, "bucket_size_y": 10**6}
    made, exact = (experiment("FGNN", **SMALL, **options) for options in (whole, {}))
    exact.model.load_state_dict(made.model.state_dict())
    batch = next(iter(made.trainer.training_loader(made.loaders["train"])))
    torch.testing.assert_close(made.model.window_loss(batch), exact.model.window_loss(batch))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"readout_steps": 0}, "readout_steps must be at least 1"),
        ({"loss_type": "BPR"}, "loss_type: 'BPR' is not one of CE, SCE"),
        ({"train_windows": "chunk"}, "FGNN is not causal"),
        ({"anchor_overlap": "both"}, "anchor_overlap: 'both' is not one of"),
    ],
)
def test_bad_options(experiment, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        made = experiment("FGNN", **SMALL, **options)
        made.trainer.training_loader(made.loaders["train"])
