"""RecBole's STAMP, SASRec, SRGNN and GCSAN with encodings and anchors: theirs against ours."""

from __future__ import annotations

from typing import Any

import pytest
import reference_graph as reference
import torch
from steps import learn
from test_posrec import SESSIONS

from recbole_pos.errors import UsageError
from recbole_pos.layers.chunks import CHUNK_ELEMENTS

SIZE = {
    "SRGNN": "embedding_size",
    "STAMP": "embedding_size",
    "GCSAN": "hidden_size",
    "SASRec": "hidden_size",
}
FULL = [[*range(1, 13)], [2, 9] * 6]  # as long as a history can be
UNEVEN = [[1, 2, 1, 2, 1, 3]]  # a transition that comes twice beside one that comes once
ALL = [*SESSIONS, *FULL, *UNEVEN]


def padded(sessions: list[list[int]], width: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.tensor([s + [0] * (width - len(s)) for s in sessions])
    return rows, torch.tensor([len(s) for s in sessions])


def built(experiment, model: str, **options: Any):
    """The experiment, its model in float64 with weights far from their start, dropout off."""
    size = SIZE[model.removeprefix("Encoded").removeprefix("Anchored")]
    given = {size: 16, **({"inner_size": 16} if size == "hidden_size" else {})}
    made = experiment(model, **given, **options)
    made.model.double().eval()
    with torch.no_grad():
        for p in made.model.parameters():
            p.copy_(torch.randn_like(p) * 0.4)
        made.model.item_embedding.weight[0] = 0
    return made


@pytest.fixture
def exact_graphs(monkeypatch):
    """RecBole rounds its graphs to float32."""
    monkeypatch.setattr(torch, "FloatTensor", torch.DoubleTensor)


def assert_same(ours: Any, theirs: Any, names: dict[str, str]) -> None:
    """Scores, loss and gradients of the same weights; ``names``: theirs that we call otherwise."""
    weights = ours.model.state_dict()
    wanted = {k: weights[names.get(k, k)] for k in theirs.model.state_dict()}
    theirs.model.load_state_dict(wanted)
    rows, lengths = padded(ALL)
    torch.testing.assert_close(
        ours.model(rows, lengths), theirs.model(rows, lengths), rtol=1e-10, atol=1e-12
    )
    batch = next(iter(ours.loaders["train"]))
    losses = [made.model.calculate_loss(batch) for made in (ours, theirs)]
    torch.testing.assert_close(*losses, rtol=1e-10, atol=0)
    for loss in losses:
        loss.backward()
    mine = dict(ours.model.named_parameters())
    for name, p in theirs.model.named_parameters():
        torch.testing.assert_close(mine[names.get(name, name)].grad, p.grad, rtol=1e-8, atol=1e-12)
    test = next(iter(ours.loaders["test"]))[0]
    torch.testing.assert_close(
        ours.model.full_sort_predict(test), theirs.model.full_sort_predict(test)
    )
    torch.testing.assert_close(ours.model.predict(test), theirs.model.predict(test))


@pytest.mark.parametrize("model", ["SRGNN", "GCSAN"])
@pytest.mark.parametrize("step", [1, 2])
def test_without_anchors_they_are_recboles(
    experiment, double, exact_graphs, model: str, step: int
) -> None:
    ours = built(experiment, f"Anchored{model}", anchors=False, step=step)
    assert_same(ours, built(experiment, model, step=step), {})


def test_sasrec_with_lpe_is_recboles(experiment, double) -> None:
    ours = built(experiment, "EncodedSASRec", position=["lpe"])
    table = {"position_embedding.weight": "item_embedding.schemes.0.weight"}
    assert_same(ours, built(experiment, "SASRec"), table)


def test_stamp_without_encoding_is_recboles(experiment, double) -> None:
    assert_same(
        built(experiment, "EncodedSTAMP", position=["nope"]), built(experiment, "STAMP"), {}
    )


def test_fresh_weights_are_recboles(experiment) -> None:
    """The same seed gives the same start, but for padding, which RecBole's STAMP adds up."""
    ours = experiment("EncodedSTAMP", position=["nope"]).model.state_dict()
    theirs = experiment("STAMP").model.state_dict()
    assert theirs["item_embedding.weight"][0].any()
    theirs["item_embedding.weight"][0] = 0
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    plain = experiment("AnchoredGCSAN").model.state_dict()
    assert all(torch.equal(plain[k], v) for k, v in experiment("GCSAN").model.state_dict().items())


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("overlap", ["distance", "edge", "sum"])
@pytest.mark.parametrize("model", ["SRGNN", "GCSAN"])
def test_graphs_with_anchors_equal_loops(
    experiment, double, monkeypatch, model: str, overlap: str, far: bool
) -> None:
    """Edges of weight 1 and anchors of their distances, both divided by their sum; on a device
    with more nodes than there are."""
    made = built(experiment, f"Anchored{model}", anchor_overlap=overlap, anchor_self_weight=0.5)
    monkeypatch.setattr(made.model, "_far", lambda rows: far)
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 2000)
    rows, _ = padded(ALL)
    alias, weights, items = made.model._get_slice(rows)[:3]
    n = items.size(1)
    assert weights.shape == (len(ALL), n, 2 * n)
    for row, session in enumerate(ALL):
        place = {int(items[row, alias[row, t]]): int(alias[row, t]) for t in range(len(session))}
        assert set(place) == set(session)
        want = torch.zeros(n, 2 * n)
        found = reference.message_weights(session, True, overlap, 0.5, True, counted=False)
        for side, receivers in enumerate(found):
            for item, senders in receivers.items():
                for sender, weight in senders.items():
                    want[place[item], side * n + place[sender]] = weight
        torch.testing.assert_close(weights[row], want)


@pytest.mark.parametrize("model", ["AnchoredSRGNN", "AnchoredGCSAN", "EncodedSTAMP"])
def test_a_session_scores_alike_alone_and_in_a_batch(experiment, double, model: str) -> None:
    made = built(experiment, model)
    together = made.model(*padded(ALL))
    for row, session in enumerate(ALL):
        alone = made.model(*padded([session], len(session)))
        torch.testing.assert_close(alone[0], together[row])


@pytest.mark.parametrize("model", ["EncodedSTAMP", "EncodedSASRec"])
@pytest.mark.parametrize("scheme", ["ldpe", "lpe2d"])
def test_places_are_added_to_sessions_alone(experiment, double, model: str, scheme: str) -> None:
    """By the place from both ends, or from the start and the length; padding stays zero.

    Candidates stay as they are.
    """
    embedding = built(experiment, model, position=[scheme]).model.item_embedding
    table, width = embedding.schemes[0].weight, embedding.weight.size(1) // 2
    rows, _ = padded(ALL)
    found = embedding(rows)
    for row, session in enumerate(ALL):
        for place, item in enumerate(session):
            second = len(session) - 1 - (place if scheme == "ldpe" else 0)
            code = torch.cat((table[place, :width], table[second, width:]))
            torch.testing.assert_close(found[row, place], embedding.weight[item] + code)
        assert not found[row, len(session) :].any()
    items = torch.arange(5)
    assert torch.equal(embedding(items), embedding.weight[:5])


def test_stamp_with_ldpe_in_loops(experiment, double) -> None:
    model = built(experiment, "EncodedSTAMP").model
    found = model(*padded(ALL))
    for row, session in enumerate(ALL):
        x = list(model.item_embedding(torch.tensor([session]))[0])
        mean = sum(x) / len(x)
        total = mean
        for state in x:
            inner = model.w1(state) + model.w2(x[-1]) + model.w3(mean) + model.b_a
            total = total + model.w0(torch.sigmoid(inner)) * state
        want = torch.tanh(model.mlp_a(total)) * torch.tanh(model.mlp_b(x[-1]))
        torch.testing.assert_close(found[row], want)


@pytest.mark.parametrize(
    "model", ["EncodedSTAMP", "EncodedSASRec", "AnchoredSRGNN", "AnchoredGCSAN"]
)
def test_one_batch_is_learnt_and_gradients_are_finite(experiment, model: str) -> None:
    off = {"hidden_dropout_prob": 0.0, "attn_dropout_prob": 0.0}
    off = (
        off if SIZE[model.removeprefix("Encoded").removeprefix("Anchored")] == "hidden_size" else {}
    )
    made = experiment(model, learning_rate=0.01, **off)
    batch = next(iter(made.loaders["train"]))
    made.model.calculate_loss(batch).backward()
    for name, p in made.model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name
    losses = learn(made.trainer, made.model.calculate_loss, batch, 150)
    assert losses[-1] < 0.3 < 3 < losses[0]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("EncodedSTAMP", {"position": ["rope"]}, "position: .*rope"),
        ("EncodedSASRec", {"position": ["time_learned"]}, "position: .*TimeEmbedding"),
        ("EncodedSTAMP", {"position": ["ldpa"]}, "unknown scheme 'ldpa'"),
        ("EncodedSTAMP", {"loss_type": "SCE"}, "loss_type: 'SCE' is not one of CE, BPR"),
        ("AnchoredSRGNN", {"anchor_overlap": "both"}, "anchor_overlap: 'both'"),
        ("AnchoredSRGNN", {"step": 0}, "step must be at least 1"),
        ("AnchoredGCSAN", {"weight": 1.5}, "weight must be at most 1"),
    ],
)
def test_bad_options(experiment, model: str, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        experiment(model, **options)
