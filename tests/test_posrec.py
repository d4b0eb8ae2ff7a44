"""PosRec: equations 7 to 10 against loops, invariances, training from prefixes, options."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import reference_graph as reference
import torch
from steps import learn

import recbole_pos
from recbole_pos.errors import UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.layers.context import SequenceContext

SESSIONS = [[3, 5, 3, 7, 5, 3, 9], [2], [4, 4, 4], [1, 2, 3, 4, 5, 1], [8, 6], [6, 6, 8, 6, 1]]
MESSAGES = ("anchors", "anchor_overlap", "anchor_self_weight", "messages")


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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"anchors": False, "messages": "mean", "lambda_2": 0.5},
        {"anchor_overlap": "sum", "anchor_self_weight": 0.5, "graph_layers": 2, "n_layers": 2},
        {"anchor_overlap": "edge", "messages": "mean", "lambda_0": 0.3, "lambda_1": 2.0},
    ],
    ids=str,
)
def test_states_equal_the_equations(experiment, double, options: dict) -> None:
    made = experiment("PosRec", **options)
    model = shaken(made)
    anchors, overlap, self_weight, messages = (made.config[key] for key in MESSAGES)
    given = {
        "with_anchors": anchors,
        "overlap": overlap,
        "self_weight": self_weight,
        "mean": messages == "mean",
    }
    found = states(model, SESSIONS)
    for row, session in enumerate(SESSIONS):
        want = reference.posrec(model, session, given)
        torch.testing.assert_close(found[row], want, rtol=1e-9, atol=1e-9)


def test_gradients_equal_those_of_the_loops(experiment, double) -> None:
    """Of every weight, and of item vectors through the graph alone: nothing is scored here."""
    model = shaken(experiment("PosRec", graph_layers=2))
    given = {"with_anchors": True, "overlap": "distance", "self_weight": 0.0, "mean": False}
    want = torch.stack([reference.posrec(model, session, given) for session in SESSIONS])
    weight, params = torch.randn_like(want), list(model.parameters())
    mine, theirs = (
        torch.autograd.grad((found * weight).sum(), params, allow_unused=True)
        for found in (states(model, SESSIONS), want)
    )
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_graph_layers_have_weights_of_their_own(experiment) -> None:
    sizes = [
        sum(p.numel() for p in experiment("PosRec", graph_layers=n).model.parameters())
        for n in (1, 2, 3)
    ]
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] > 0


@pytest.mark.parametrize("position", ["spe2d", "lpe2d"])
def test_encodings_get_the_length_of_the_session(experiment, monkeypatch, position: str) -> None:
    """Not what lies before and after a node, which is less where its item comes again."""
    model = shaken(experiment("PosRec", position=[position]))
    (scheme,), seen = model.position_embedding, []
    rows = scheme.rows
    monkeypatch.setattr(scheme, "rows", lambda *given: seen.append(given) or rows(*given))
    states(model, SESSIONS)
    assert seen[0][2].tolist() == [len(s) for s in SESSIONS for _ in set(s)]


def test_dropout_stands_before_and_in_the_transformer(experiment, monkeypatch) -> None:
    model = experiment("PosRec", hidden_dropout_prob=0.5).model.train()
    seen = []
    monkeypatch.setattr(model.trm_encoder, "forward", lambda x, ctx: seen.append(x) or x)
    states(model, SESSIONS)
    assert 0.3 < (seen[0] == 0).float().mean() < 0.7


@pytest.mark.parametrize("position", [["ldpe"], ["dpe"], ["nope"]], ids=str)
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_session_scores_alike_alone_and_in_a_batch(
    experiment, double, position, norm: str
) -> None:
    model = shaken(experiment("PosRec", position=position, norm=norm, n_heads=2))
    together = states(model, SESSIONS)
    assert not torch.allclose(together[0], together[3])
    for row, session in enumerate(SESSIONS):
        torch.testing.assert_close(states(model, [session])[0], together[row])
    turned = states(model, SESSIONS[::-1])
    torch.testing.assert_close(turned.flip(0), together)


def test_scores_are_products_with_the_initial_embeddings(experiment) -> None:
    """Equation 11, from RecBole's padded rows, however wide their padding."""
    made = experiment("PosRec")
    model = shaken(made)
    rows = made.loaders["test"]._dataset[np.arange(20)]
    scores = model.full_sort_predict(rows)
    table = model.item_embedding.weight
    for row in range(len(rows)):
        length = int(rows["item_length"][row])
        session = rows["item_id_list"][row, :length].tolist()
        torch.testing.assert_close(scores[row], states(model, [session])[0] @ table.T)
    wanted = scores[torch.arange(len(rows)), rows["item_id"]]
    torch.testing.assert_close(model.predict(rows), wanted)


def test_what_the_model_reads(experiment) -> None:
    """Order, length and, with anchors, distances; swapping items far from both ends changes it."""
    model = shaken(experiment("PosRec"))
    one, two = states(model, [[1, 2, 3, 4, 5], [1, 3, 2, 4, 5]])
    assert (one - two).abs().max() > 1e-3
    model.anchors = False
    without = states(model, [[1, 2, 3, 4, 5]])[0]
    assert (one - without).abs().max() > 1e-3


def test_prefix_windows_give_the_loss_of_recboles_rows(experiment) -> None:
    """Each training target once, with what is before it: packed or padded."""
    made = experiment("PosRec", MAX_ITEM_LIST_LENGTH=5)
    model = made.model.double().eval()
    loader = made.trainer.training_loader(made.loaders["train"])
    sizes = [len(batch) for batch in loader]
    assert sum(sizes) == loader.targets == len(made.loaders["train"]._dataset)
    assert max(sizes) <= 16 and min(sizes) >= 14  # train_batch_size counts prefixes
    for batch in loader:
        assert len(batch.lengths) == len(batch) and len(batch.items) == batch.lengths.sum()
    total = sum(model.window_loss(batch) * len(batch) for batch in loader) / loader.targets
    rows = made.loaders["train"]._dataset[np.arange(loader.targets)]
    torch.testing.assert_close(total, model.calculate_loss(rows), rtol=1e-9, atol=1e-9)


def test_batches_hold_prefixes_of_like_length(experiment) -> None:
    made = experiment("PosRec", MAX_ITEM_LIST_LENGTH=12)
    loader = made.trainer.training_loader(made.loaders["train"])
    spread = [int(batch.lengths.max() - batch.lengths.min()) for batch in loader]
    assert np.mean(spread) <= 1.5
    loader.set_epoch(1)
    first = [batch.items.tolist() for batch in loader]
    assert first == [batch.items.tolist() for batch in loader]
    loader.set_epoch(2)
    assert first != [batch.items.tolist() for batch in loader]


def test_one_batch_is_learnt_and_gradients_are_finite(experiment) -> None:
    made = experiment("PosRec", learning_rate=0.01)
    batch = next(iter(made.trainer.training_loader(made.loaders["train"])))
    made.model.window_loss(batch).backward()
    for name, p in made.model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.any(), name
    losses = learn(made.trainer, made.model.window_loss, batch, 200)
    assert losses[-1] < 0.1 < 3 < losses[0]


@pytest.mark.parametrize("length", [1, 12])
def test_gradients_of_extreme_sessions(experiment, length: int) -> None:
    """Length 1, one item repeated, and the longest line there can be."""
    model = experiment("PosRec").model
    found = states(model, [[3] * length, list(range(1, length + 1))])
    found.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def run(tiny: Path, folder: Path, **options):
    given = {
        "data_path": str(tiny),
        "hidden_size": 16,
        "inner_size": 16,
        "MAX_ITEM_LIST_LENGTH": 12,
        "epochs": 5,
        "lr_decay_step": 2,
        **options,
    }
    return recbole_pos.run("PosRec", "tiny", None, given, run_dir=folder, verbose=False)


def test_runs_and_resumes_with_the_learning_rate_of_the_epoch(
    tiny: Path, tmp_path: Path, monkeypatch
) -> None:
    from recbole_pos.experiment.trainer import PosTrainer

    rates: list[tuple[int, float]] = []
    step = PosTrainer._step

    def watched(self, loss_func, batch, watch, number: int):
        epoch = self.progress.next_epoch
        rates.append((epoch, self.optimizer.param_groups[0]["lr"]))
        if stop_at == (epoch, number):
            raise KeyboardInterrupt
        return step(self, loss_func, batch, watch, number)

    monkeypatch.setattr(PosTrainer, "_step", watched)
    stop_at = None
    whole = run(tiny, tmp_path / "whole")
    assert {epoch: round(rate, 9) for epoch, rate in rates} == {
        0: 1e-3,
        1: 1e-3,
        2: 1e-4,
        3: 1e-4,
        4: 1e-5,
    }
    stop_at = (3, 1)
    with pytest.raises(KeyboardInterrupt):
        run(tiny, tmp_path / "broken")
    stop_at = None
    resumed = recbole_pos.run(resume=tmp_path / "broken", verbose=False)
    assert resumed.test == whole.test and 0 <= whole.test["hit@10"] <= 1
    one, two = (
        checkpoint.load(tmp_path / name / "checkpoint.pt")["weights"]["state_dict"]
        for name in ("whole", "broken")
    )
    assert all(torch.equal(one[key], two[key]) for key in one)
    loaded = recbole_pos.load(tmp_path / "whole")
    test = loaded.trainer.evaluate(loaded.loaders["test"], load_best_model=False)
    assert dict(test) == whole.test


def test_rows_of_recbole_train_it_too(tiny: Path, tmp_path: Path) -> None:
    assert run(tiny, tmp_path / "run", augmentation="prefix", epochs=1).test["hit@10"] >= 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"anchor_overlap": "both"}, "anchor_overlap: 'both' is not one of distance, edge, sum"),
        ({"messages": "max"}, "messages: 'max' is not one of sum, mean"),
        ({"graph_layers": 0}, "graph_layers must be at least 1"),
        ({"anchor_self_weight": -1.0}, "anchor_self_weight must be at least 0"),
        ({"lr_decay_rate": 0.0}, "lr_decay_rate must be"),
        ({"n_heads": 3}, "hidden_size 16 is not a multiple of n_heads 3"),
        ({"position": ["ldpe", "rope"]}, "position: .*rope"),
        ({"position": ["time_learned"]}, "position: .*time_learned"),
        ({"norm": "mid"}, "norm: 'mid' is not one of pre, post"),
        ({"hidden_act": "sin"}, "hidden_act: 'sin' is not one of gelu"),
    ],
)
def test_bad_options(experiment, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        experiment("PosRec", **options)


def test_windows_with_several_targets_are_refused(experiment) -> None:
    with pytest.raises(UsageError, match="train_windows: PosRec is not causal.*prefix.*'chunk'"):
        experiment("PosRec", train_windows="chunk")
    made = experiment("PosRec")
    items, ctx = packed(SESSIONS)
    with pytest.raises(ValueError, match="24 positions of 6 sessions"):
        made.model.states(items, ctx, None)


@pytest.mark.parametrize(("name", "lambda_2"), [("diginetica", 1.0), ("yoochoose", 0.5)])
def test_presets_are_those_of_the_paper(name: str, lambda_2: float) -> None:
    config = recbole_pos.config.posconfig.PosConfig(None, "ml-100k", [f"posrec/{name}.yaml"])
    assert config["model"] == "PosRec" and config["lambda_2"] == lambda_2
    assert config["train_batch_size"] == config["hidden_size"] == 100
    assert (config["learning_rate"], config["lr_decay_rate"]) == (1e-3, 0.1)
    assert (config["lr_decay_step"], config["epochs"]) == (3, 4)
    assert config["lambda_0"] == config["lambda_1"] == config["graph_layers"] == 1
    assert config["weight_decay"] > 0
