"""RecBole against ours: RecBole's models, losses and evaluator, same weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference_graph as reference
import torch
from recbole.config import Config
from recbole.data import create_dataset, data_preparation
from recbole.model.sequential_recommender import SASRec
from recbole.trainer import Trainer
from recbole.utils import init_seed
from reference_graph import SESSIONS
from test_recbole_view import options_of, write_shop

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.experiment.build import Experiment, prepare
from recbole_pos.model.models import CAUSAL_BUILTINS
from recbole_pos.model.training import compute_every_state, make_adapter

AS_RECBOLE = {"norm": "post", "position_from": "oldest", "inner_size": 24}
AS_RECBOLE |= {"hidden_dropout_prob": 0.0, "attn_dropout_prob": 0.0}
FULL = [[*range(1, 13)], [2, 9] * 6]  # as long as a history can be
UNEVEN = [[1, 2, 1, 2, 1, 3]]  # a transition that comes twice beside one that comes once
ALL = [*SESSIONS, *FULL, *UNEVEN]


def scatter(model: Any, std: float = 0.4) -> Any:
    """The model in float64 and evaluation mode, its weights far from their start."""
    torch.manual_seed(0)
    for parameter in model.double().eval().parameters():
        torch.nn.init.normal_(parameter, std=std)
    with torch.no_grad():
        model.item_embedding.weight[0] = 0
    return model


# SASRec and evaluation


def test_weights_of_recboles_sasrec_load_strictly(experiment) -> None:
    """Same outputs in float64, in evaluation and (without dropout) in training mode."""
    options = {"n_layers": 3, "hidden_dropout_prob": 0.0, "attn_dropout_prob": 0.0}
    peer = experiment("SASRec", hidden_size=16, inner_size=24, **options)
    ours = experiment("PosSASRec", **AS_RECBOLE, n_layers=3)
    ours.model.double().load_state_dict(scatter(peer.model).state_dict(), strict=True)
    rows = peer.loaders["train"]._dataset[np.arange(200)]
    for mode in (True, False):
        models = [made.model.train(mode) for made in (ours, peer)]
        scores = [model.full_sort_predict(rows) for model in models]
        torch.testing.assert_close(*scores, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(*(model.predict(rows) for model in models))


def test_all_positions_and_prefix_rows_give_the_same_loss(experiment) -> None:
    """Position t of a window is the prefix up to t, when positions count from the oldest."""
    made = experiment("PosSASRec", **AS_RECBOLE, MAX_ITEM_LIST_LENGTH=30)
    model = made.model.double().eval()
    windows = made.trainer.training_loader(made.loaders["train"])
    total = sum(model.window_loss(batch) * len(batch) for batch in windows) / windows.num_targets
    rows = made.loaders["train"]._dataset[np.arange(windows.num_targets)]
    torch.testing.assert_close(total, model.calculate_loss(rows), rtol=1e-9, atol=1e-9)


def test_evaluation_equals_stock_recbole_on_the_same_weights(tmp_path, tiny, monkeypatch) -> None:
    """Metrics of RecBole's trainer on RecBole's data, against ours, for the same SASRec weights.

    The tiny dataset's times are small enough after subtraction to be exact in float32 too.
    """
    shared = {"data_path": str(tiny), "MAX_ITEM_LIST_LENGTH": 12, "show_progress": False}
    shared |= {"metrics": ["Hit", "NDCG", "MRR"], "topk": [5, 10, 20], "valid_metric": "NDCG@10"}
    shared |= {"metric_decimal_place": 6, "train_neg_sample_args": None}
    shared |= {"load_col": {"inter": ["user_id", "item_id", "timestamp"]}}
    monkeypatch.chdir(tmp_path)  # RecBole's trainer writes log_tensorboard/ there
    # stable order of the file decides ties in both; float32 must not make new ones
    config = Config("SASRec", "tiny", config_dict={**shared, "checkpoint_dir": str(tmp_path)})
    dataset = create_dataset(config)
    dataset.inter_feat["timestamp"] -= dataset.inter_feat["timestamp"].min()
    _, valid, test = data_preparation(config, dataset)
    init_seed(1, True)
    model = SASRec(config, dataset)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    trainer = Trainer(config, model)
    want = [dict(trainer.evaluate(part, load_best_model=False)) for part in (valid, test)]
    for name, options in (("PosSASRec", {**AS_RECBOLE, "inner_size": 256}), ("SASRec", {})):
        made = prepare(PosConfig(name, "tiny", None, {**shared, **options}))
        made.model.load_state_dict(model.state_dict())
        loaders = (made.loaders[phase] for phase in ("valid", "test"))
        assert [dict(made.trainer.evaluate(one, load_best_model=False)) for one in loaders] == want
    assert want[1]["ndcg@10"] > 0


# RecBole's causal models at every position, and BERT4Rec where something is masked


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Experiment]:
    """``made(model, **options)``: in float64, without dropout, all weights random and large."""

    def build(model: str, **options: Any) -> Experiment:
        given = options_of(model, write_shop(tmp_path))
        given |= {"train_batch_size": 16, "augmentation": "all_positions", **options}
        experiment = prepare(PosConfig(model, "tiny", None, given))
        scatter(experiment.model, 0.2)
        return experiment

    return build


@pytest.mark.parametrize(
    ("model", "windows"), list(zip(CAUSAL_BUILTINS, ["chunk", "prefix"] * 3, strict=False))
)
def test_same_loss_as_recboles_rows(made, model: str, windows: str) -> None:
    """Every history fits: the scores of RecBole's ``full_sort_predict``, target by target."""
    experiment = made(model, train_windows=windows)
    loader = experiment.loaders["train"]
    rows = loader._dataset[np.arange(len(loader._dataset))]
    loss = make_adapter(experiment.config, experiment.model).choose_loss(loader.packed)
    with torch.no_grad():
        got = sum(loss(batch) * len(batch) for batch in loader)
        scores = experiment.model.full_sort_predict(rows)
        target = scores.gather(1, rows["item_id"][:, None])[:, 0]
        want = (scores[:, 1:].logsumexp(1) - target).sum()  # padding is no candidate
    assert len(rows) == loader.num_targets
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    assert "gather_indexes" not in vars(experiment.model)


@pytest.mark.parametrize("model", CAUSAL_BUILTINS)
def test_states_stand_with_their_targets_and_know_no_later_event(made, model: str) -> None:
    """Sliding windows have context without targets: each state is that of the window up to it."""
    options = {"MAX_ITEM_LIST_LENGTH": 4, "train_windows": "sliding", "window_stride": 1}
    experiment = made(model, **options)
    net, loader = experiment.model, experiment.loaders["train"]
    batch = loader.gather(np.arange(0, len(loader.windows.start), 3))
    assert batch.queries is not None
    ends = batch.lengths.cumsum(0)
    with torch.no_grad():
        states = compute_every_state(net, batch)
        assert len(states) == len(batch.queries) == len(batch)
        for state, at in zip(states, batch.queries.tolist(), strict=True):
            row = int((ends <= at).sum())
            begin = int(ends[row] - batch.lengths[row])
            want = net(batch.items[None, begin : at + 1], torch.tensor([at + 1 - begin]))
            torch.testing.assert_close(state, want[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("last", [0.0, 1.0])
def test_berts_loss_is_recboles_where_something_is_masked(made, double, last: float) -> None:
    """Masks at random, and of the newest event (``ft_ratio``)."""
    experiment = made("BERT4Rec", augmentation="prefix", mask_ratio=0.5, ft_ratio=last)
    model, rows = experiment.model.train(), next(iter(experiment.loaders["train"]))
    ours = make_adapter(experiment.config, model).choose_loss(packed=False)
    assert 0 < (rows["MASK_INDEX"] > 0).sum() < rows["MASK_INDEX"].numel()
    found = []
    for loss in (ours, model.calculate_loss):
        model.zero_grad()
        torch.manual_seed(1)  # of dropout
        value = loss(rows)
        value.backward()
        found.append((value.detach(), [p.grad for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
    rows["MASK_INDEX"] = torch.zeros_like(rows["MASK_INDEX"])
    assert ours(rows) == 0 and model.calculate_loss(rows).isnan()


# STAMP, SASRec, SRGNN and GCSAN with encodings and anchors


STAMP = {"embedding_size": 16}
SASREC = {"hidden_size": 16, "inner_size": 16}


def padded(sessions: list[list[int]], width: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.tensor([s + [0] * (width - len(s)) for s in sessions])
    return rows, torch.tensor([len(s) for s in sessions])


@pytest.mark.parametrize(
    ("ours", "peer", "options", "renamed"),
    [
        ("AnchoredSRGNN", "SRGNN", {**STAMP, "anchors": False}, {}),
        ("AnchoredGCSAN", "GCSAN", {**SASREC, "anchors": False}, {}),
        ("EncodedSTAMP", "STAMP", {**STAMP, "position": ["nope"]}, {}),
        (
            "EncodedSASRec",
            "SASRec",
            {**SASREC, "position": ["lpe"]},
            {"position_embedding.weight": "item_embedding.schemes.0.weight"},
        ),
    ],
)
def test_without_their_additions_they_are_recboles(
    experiment, double, monkeypatch, ours: str, peer: str, options: dict, renamed: dict
) -> None:
    """Scores, loss and gradients of the same weights."""
    monkeypatch.setattr(torch, "FloatTensor", torch.DoubleTensor)  # RecBole rounds its graphs
    one = experiment(ours, **options)
    added = ("anchors", "position")
    other = experiment(peer, **{key: v for key, v in options.items() if key not in added})
    weights = scatter(one.model).state_dict()
    other.model.double().eval()
    other.model.load_state_dict({k: weights[renamed.get(k, k)] for k in other.model.state_dict()})
    models, batch = (one.model, other.model), next(iter(one.loaders["train"]))
    scores = [model(*padded(ALL)) for model in models]
    torch.testing.assert_close(*scores, rtol=1e-10, atol=1e-12)
    losses = [model.calculate_loss(batch) for model in models]
    torch.testing.assert_close(*losses, rtol=1e-10, atol=0)
    for loss in losses:
        loss.backward()
    mine = dict(one.model.named_parameters())
    for name, p in other.model.named_parameters():
        own = mine[renamed.get(name, name)]
        torch.testing.assert_close(own.grad, p.grad, rtol=1e-8, atol=1e-12)
    test = next(iter(one.loaders["test"]))[0]
    torch.testing.assert_close(*(model.full_sort_predict(test) for model in models))
    torch.testing.assert_close(*(model.predict(test) for model in models))


@pytest.mark.parametrize(("model", "sizes"), [("SRGNN", STAMP), ("GCSAN", SASREC)])
def test_graphs_with_anchors_equal_loops(experiment, double, model: str, sizes: dict) -> None:
    """Edges of weight 1 and anchors of their distances, both divided by their sum."""
    net = scatter(experiment(f"Anchored{model}", **sizes).model)
    alias, weights, items = net._get_slice(padded(ALL)[0])[:3]
    n = items.size(1)
    assert weights.shape == (len(ALL), n, 2 * n)
    for row, session in enumerate(ALL):
        place = {int(items[row, alias[row, t]]): int(alias[row, t]) for t in range(len(session))}
        assert set(place) == set(session)
        want = reference.message_weights(session, True, mean=True, counted=False)
        want = torch.cat([reference.matrix(side, place, n) for side in want], 1)
        torch.testing.assert_close(weights[row], want)


@pytest.mark.parametrize(
    ("model", "sizes", "scheme"),
    [("EncodedSTAMP", STAMP, "ldpe"), ("EncodedSASRec", SASREC, "lpe2d")],
)
def test_places_are_added_to_sessions_only(experiment, double, model, sizes, scheme) -> None:
    """By the place from both ends, or from the start and the length; padding stays zero."""
    net = scatter(experiment(model, **sizes, position=[scheme]).model)
    embedding = net.item_embedding
    table, width = embedding.schemes[0].weight, embedding.weight.size(1) // 2
    found = embedding(padded(ALL)[0])
    for row, session in enumerate(ALL):
        for place, item in enumerate(session):
            second = len(session) - 1 - (place if scheme == "ldpe" else 0)
            code = torch.cat((table[place, :width], table[second, width:]))
            torch.testing.assert_close(found[row, place], embedding.weight[item] + code)
        assert not found[row, len(session) :].any()
    assert torch.equal(embedding(torch.arange(5)), embedding.weight[:5])  # candidates
