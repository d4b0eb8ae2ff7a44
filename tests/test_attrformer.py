"""AttrFormer: its layers and loss against loops, what is left without relations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import reference
import reference_relations
import torch
from shop import all_windows, find, open_shop, places, shaken, tables, train, write
from steps import learn
from torch import Tensor

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.splits import TRAIN
from recbole_pos.data.windows import TARGET_EVENT
from recbole_pos.errors import UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.build import prepare
from recbole_pos.layers import chunks
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.losses import dirichlet_prior, full_cross_entropy, posterior_loss
from recbole_pos.layers.relations import SparseProduct

PLAIN = {"prior_weight": 0.0, "future_weights": [1.0]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("shop"), tables())


def attention_in_loops(layer, x: Tensor, lengths: list[int]) -> Tensor:
    """Equations 2 to 5, every row and head by itself, and the first part of W^O."""
    parts, start = [], 0
    size = layer.head_size
    for length in lengths:
        rows = x[start : start + length]
        q, k, v = (getattr(layer, name)(rows) for name in ("query", "key", "value"))
        heads = [
            reference.dot_product_attention(*(y[:, h * size : (h + 1) * size] for y in (q, k, v)))
            for h in range(layer.n_heads)
        ]
        parts.append(torch.cat(heads, 1))
        start += length
    return torch.cat(parts)


@pytest.mark.parametrize("update", ["gated", "replace"])
@pytest.mark.parametrize("user_layers", ["odd", "even", "all", "none"])
@torch.no_grad()
def test_every_layer_equals_the_equations(
    folder: Path, double, user_layers: str, update: str
) -> None:
    """Equations 2 to 9 and section 3.1.3 with attributes of every kind, layer by layer."""
    read = {} if user_layers == "none" else {"user_update": update}
    made = open_shop(folder, user_layers=user_layers, **read, position=["nope"])
    model, rows = shaken(made), all_windows(made)
    order, heads, users = find(model, rows)
    assert all(len(edges.value) for edges in [*heads, users])
    assert (places(rows)[users.reader] == places(rows)[users.source]).all()
    x = model.item_embedding(model.lookup.items[torch.from_numpy(rows.events)])
    table = model.lookup.user_table
    own = table.matrix().diagonal()[table.group[order.user]].tolist()
    assert 0 in own  # a user without attributes
    for number, layer in enumerate(model.trm_encoder.layer, 1):
        attention, feed = layer.multi_head_attention, layer.feed_forward
        norm = attention.LayerNorm
        h = reference.layer_norm(x, norm.weight, norm.bias, norm.eps)
        value = attention.relation_value(h).view(len(h), attention.relation_heads, -1)
        augmented = reference_relations.augmented_heads(heads, attention.relation_mix, value)
        joined = torch.cat(
            (attention_in_loops(attention, h, rows.lengths), augmented.flatten(1)), 1
        )
        output = torch.cat((attention.dense.weight, attention.relation_dense.weight), 1)
        x = x + joined @ output.t() + attention.dense.bias  # equation 9: one W^O for all heads
        x = feed(x)
        if {"odd": number % 2, "even": number % 2 == 0, "all": 1, "none": 0}[user_layers]:
            smooth = reference_relations.smoothed(users, own, update == "replace", x)
            x = x + layer.user_gate * smooth if update == "gated" else smooth
    want = reference.layer_norm(x, model.LayerNorm.weight, model.LayerNorm.bias, norm.eps)
    torch.testing.assert_close(model.row_states(rows, None), want, rtol=1e-9, atol=1e-9)


def test_sparse_equals_dense(double) -> None:
    """Product and gradient, with empty rows and columns."""
    rng = np.random.default_rng(0)
    row, col = np.nonzero(rng.random((30, 11)) < 0.2)
    weight = rng.normal(size=len(row))
    product = SparseProduct.build(row, col, weight, 33, 12, torch.device("cpu"), torch.float64)
    dense = torch.zeros(33, 12)
    dense[row, col] = torch.from_numpy(weight)
    x = torch.randn(12, 5, requires_grad=True)
    torch.testing.assert_close(product(x), dense @ x)
    assert torch.autograd.gradcheck(product, x)


@pytest.mark.parametrize("prior_weight", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("betas", [[1.0, 0.25, 0.1], [1.0], [0.5], [2.0, 2.0]])
def test_posterior_targets_equal_equation_17(double, monkeypatch, betas, prior_weight) -> None:
    """Positions near the end have fewer items after them; in one chunk and in many."""
    m, items, n = 9, 7, len(betas)
    hidden = torch.randn(m, 4, requires_grad=True)
    weight = torch.randn(items, 4, requires_grad=True)
    counts = torch.tensor([0, 3, 0, 9, 1, 1, 5])
    targets = torch.randint(1, items, (m, n))
    known = torch.arange(n) < torch.randint(1, n + 1, (m, 1))
    futures = [row[real].tolist() for row, real in zip(targets, known, strict=True)]
    want = reference_relations.posterior(
        hidden, weight, futures, betas, counts.tolist(), prior_weight
    )
    given = (targets, known * torch.tensor(betas), dirichlet_prior(counts), prior_weight)
    want_grads = torch.autograd.grad(want, (hidden, weight))
    for rows in (128, 2):
        monkeypatch.setattr("recbole_pos.layers.losses.MIN_ROWS", rows)
        monkeypatch.setitem(chunks.CHUNK_ELEMENTS, "cpu", rows * items)
        loss = posterior_loss(hidden, weight, *given)
        torch.testing.assert_close(loss, want)
        grads = torch.autograd.grad(3 * loss, (hidden, weight))
        torch.testing.assert_close(grads[0], 3 * want_grads[0])
        torch.testing.assert_close(grads[1][1:], 3 * want_grads[1][1:])
        assert (grads[1][0] == 0).all()  # padding learns nothing
    if prior_weight == 0 and betas == [1.0]:
        plain = full_cross_entropy(hidden, weight, targets[:, 0])
        torch.testing.assert_close(loss, plain, rtol=1e-12, atol=1e-12)


def test_the_loss_of_a_batch_is_equation_17(folder: Path, double) -> None:
    """Futures reach over the borders of windows, and end with the training part."""
    made = open_shop(folder, future_weights=[1.0, 0.25, 0.25], prior_weight=0.5)
    model, log, part = shaken(made), made.dataset.log, made.dataset.part
    counts = np.bincount(log.items.numpy()[part == TRAIN], minlength=model.n_items).tolist()
    loader = made.trainer.training_loader(made.loaders["train"])
    batch = loader.gather(np.concatenate(loader._batches()))
    futures, users = [], log.users.tolist()
    for event in batch.events.tolist():
        ahead = range(event + 1, min(event + 4, len(log)))
        same = [e for e in ahead if users[e] == users[event] and part[e] == TRAIN]
        futures.append([int(log.items[e]) for e in same])
    assert {len(future) for future in futures} == {1, 2, 3}
    hidden = model.row_states(all_windows(made), None)
    want = reference_relations.posterior(
        hidden, model.item_embedding.weight, futures, [1.0, 0.25, 0.25], counts, 0.5
    )
    torch.testing.assert_close(model.window_loss(batch), want)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_without_relations_it_is_the_backbone(folder: Path, double, norm: str) -> None:
    """The weights of PosSASRec load strictly; states, scores and loss are the same numbers."""
    made = open_shop(folder, relations=[], norm=norm, chunking=False, **PLAIN)
    model = shaken(made)
    keys = ("hidden_size", "inner_size", "n_layers", "n_heads", "MAX_ITEM_LIST_LENGTH", "data_path")
    given = {key: made.config[key] for key in keys}
    given["data_path"] = str(folder)
    given |= {"norm": norm, "load_col": made.config["load_col"], "topk": [3]}
    given |= {"valid_metric": "NDCG@3", "filter_inter_by_user_or_item": False}
    given |= {"train_batch_size": 4, "hidden_dropout_prob": 0.0, "length_pool": 1}
    base = prepare(PosConfig("PosSASRec", "shop", None, given))
    base.model.double().eval().load_state_dict(model.state_dict())
    rows = made.loaders["test"]._dataset[np.arange(10)]
    torch.testing.assert_close(
        model.full_sort_predict(rows), base.model.full_sort_predict(rows), rtol=0, atol=0
    )
    loaders = [m.trainer.training_loader(m.loaders["train"]) for m in (made, base)]
    for mine, theirs in zip(*loaders, strict=True):
        assert torch.equal(mine.items, theirs.items)
        assert model.window_loss(mine) == base.model.window_loss(theirs)


@torch.no_grad()
def test_users_count_for_nothing_at_the_start(folder: Path, double) -> None:
    """The gate of section 3.1.3 opens from 0; then what similar users do moves every state."""
    made = open_shop(folder, relations=["country", "age"])
    model, rows = made.model.double().eval(), all_windows(made)
    items = model.lookup.items[torch.from_numpy(rows.events)]
    backbone = model.encode(items, SequenceContext.from_lengths(torch.from_numpy(rows.lengths), 5))
    torch.testing.assert_close(model.row_states(rows, None), backbone)
    model.trm_encoder.layer[0].user_gate.fill_(0.5)
    assert not torch.allclose(model.row_states(rows, None), backbone)


def test_a_single_sequence_in_a_batch(folder: Path, double) -> None:
    """Of any length; gradients are finite, and nobody else is there to be read."""
    made = open_shop(folder)
    model = shaken(made)
    loader = made.trainer.training_loader(made.loaders["train"])
    for window in range(len(loader.windows.start)):
        model.zero_grad()
        loss = model.window_loss(loader.gather(np.array([window])))
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert loss.isfinite() and all(grad.isfinite().all() for grad in grads)
    rows = made.loaders["test"]._dataset
    for n in range(len(rows)):
        assert model.full_sort_predict(rows[[n]]).isfinite().all()


@pytest.mark.parametrize("update", ["gated", "replace"])
def test_attributes_that_are_missing_everywhere(tmp_path: Path, double, update: str) -> None:
    """Relations to nothing leave the backbone: equal to a model without the relation's output."""
    made_tables = {name: table.astype(object) for name, table in tables().items()}
    for column in ("brand:token", "tags:token_seq", "price:float", "weight:float"):
        made_tables["item"][column] = ""
    made_tables["item"].loc[0, ["price:float", "weight:float"]] = 1.0  # of an item that leaves
    made_tables["item"].loc[0, ["brand:token", "tags:token_seq"]] = "other"
    for column in ("country:token", "age:float"):
        made_tables["user"][column] = ""
    made_tables["user"].loc[2, "age:float"] = 30.0
    made_tables["user"].loc[2, "country:token"] = "NO"
    made_tables["inter"] = made_tables["inter"][
        (made_tables["inter"]["item_id:token"] != made_tables["item"]["item_id:token"][0])
        & (made_tables["inter"]["user_id:token"] != "u2")
    ]
    relations = ["brand", "tags", {"field": "price", "within": "brand"}, "weight", "country", "age"]
    made = open_shop(write(tmp_path, made_tables), relations=relations, user_update=update)
    model, rows = shaken(made), all_windows(made)
    _, heads, users = find(model, rows)
    assert all(len(edges.value) == 0 for edges in [*heads, users])
    items = model.lookup.items[torch.from_numpy(rows.events)]
    ctx = SequenceContext.from_lengths(torch.from_numpy(rows.lengths), 5)
    torch.testing.assert_close(model.row_states(rows, None), model.encode(items, ctx))


def test_top_k_bounds_the_number_of_relations(folder: Path) -> None:
    made = open_shop(folder)
    rows, kept = all_windows(made), []
    for k in (1, 4, 100):
        made.model.lookup.top_k = k
        order, heads, users = find(made.model.eval(), rows)
        assert all(np.bincount(edges.reader).max() <= k for edges in [*heads, users])
        relations = made.model.lookup.relations(
            rows, np.random.default_rng(0), torch.device("cpu"), torch.float32
        )
        assert relations.edges == relations.heads.weight.numel()
        kept.append(relations.edges)
    assert kept[0] < kept[1] < kept[2] < len(order) ** 2 * len(heads) / 2


def test_one_batch_is_learnt_and_every_parameter_has_a_gradient(folder: Path) -> None:
    made = open_shop(folder, learning_rate=0.01, inner_size=32, hidden_size=32, **PLAIN)
    batch = next(iter(made.trainer.training_loader(made.loaders["train"])))
    made.model.window_loss(batch).backward()
    for name, p in made.model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.any(), name
    losses = learn(made.trainer, made.model.window_loss, batch, 200)
    assert losses[-1] < 0.2 < 2 < losses[0]


def test_runs_resume_and_load(folder: Path, tmp_path: Path, monkeypatch) -> None:
    """An interrupted run ends with the same bits, clocks of batches included."""
    from recbole_pos.experiment.trainer import PosTrainer

    step, stop_at = PosTrainer._step, None

    def stopping(self, loss_func, batch, watch, number: int):
        if stop_at == (self.progress.next_epoch, number):
            raise KeyboardInterrupt
        return step(self, loss_func, batch, watch, number)

    monkeypatch.setattr(PosTrainer, "_step", stopping)
    whole = train(folder, tmp_path / "whole", hidden_dropout_prob=0.2)
    stop_at = (2, 1)
    with pytest.raises(KeyboardInterrupt):
        train(folder, tmp_path / "broken", hidden_dropout_prob=0.2)
    stop_at = None
    resumed = recbole_pos.run(resume=tmp_path / "broken", verbose=False)
    assert resumed.test == whole.test
    one, two = (
        checkpoint.load(tmp_path / name / "checkpoint.pt")["weights"]["state_dict"]
        for name in ("whole", "broken")
    )
    assert all(torch.equal(one[key], two[key]) for key in one)
    loaded = recbole_pos.load(tmp_path / "whole")
    again = loaded.trainer.evaluate(loaded.loaders["test"], load_best_model=False)
    assert dict(again) == whole.test


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"relation_heads": 0}, "relation_heads must be at least 1"),
        ({"prior_weight": -1.0}, "prior_weight must be at least 0"),
        ({"cross_sequence": "past"}, "cross_sequence: 'past' is not one of random_order"),
        (
            {"inference_relations": "bank"},
            "inference_relations: 'bank' is not one of batch, training_bank",
        ),
        ({"user_update": "add"}, "user_update: 'add' is not one of gated, replace"),
        ({"user_layers": "first"}, "user_layers: 'first' is not one of odd, even, all, none"),
        ({"future_weights": []}, "future_weights: expected weights"),
        ({"future_weights": 1.0}, "future_weights: expected a list"),
        ({"future_weights": [float("nan")]}, "future_weights must be finite"),
        ({"future_weights": [0.0, 0.0]}, "the first above 0"),
        ({"future_weights": [1.0, -0.25]}, "future_weights must be at least 0"),
        (
            {"loss_type": "SCE", "prior_weight": 0.0, "future_weights": [1.0, 0.5]},
            "SCE cannot have posterior",
        ),
        ({"future_weights": [1.0, "x"]}, "future_weights: expected a number"),
        ({"future_weights": [0.25, 1.0]}, "future_weights: must not rise"),
        ({"train_windows": "last"}, "chunking: links .* 'last'. Set chunking: False"),
        ({"augmentation": "prefix"}, "chunking: links .* augmentation: all_positions; .*'prefix'"),
        ({"loss_type": "SCE"}, "loss_type: SCE cannot have posterior targets"),
        ({"relations": 3}, "relations: expected a list"),
    ],
)
def test_bad_options(folder: Path, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_shop(folder, **options)


def test_rows_without_their_place_in_the_log_are_refused(folder: Path) -> None:
    made = open_shop(folder)
    rows = made.loaders["test"]._dataset[np.arange(3)]
    del rows.interaction[TARGET_EVENT]
    with pytest.raises(UsageError, match="rows must say 'target_event'"):
        made.model.full_sort_predict(rows)
