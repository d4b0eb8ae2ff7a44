"""AttrFormer: its layers and loss against loops, what is left without relations, its rules."""

import math
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from conftest import CROSS_ENTROPY
from shop import (
    RELATIONS,
    SIZES,
    all_windows,
    encode,
    find,
    open_shop,
    places,
    shaken,
    tables,
    write,
)
from torch import Tensor

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.splits import TRAIN
from recbole_pos.data.windows import TARGET_EVENT
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import prepare
from recbole_pos.relations.search import Edges
from recbole_pos.relations.sparse import SparseProduct
from recbole_pos.serve.recommender import Recommender

PLAIN = CROSS_ENTROPY["AttrFormer"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("shop"), tables())


# The equations in plain loops, from the relations that are kept


def normalised(relation: dict[tuple[int, int], float], m: int) -> dict[tuple[int, int], float]:
    """Relations over the roots of the degrees of both events, which are at least one (3.1.2)."""
    degree = [0.0] * m
    for (reader, _), value in relation.items():
        degree[reader] += value
    degree = [max(total, 1.0) for total in degree]
    return {(i, j): r / math.sqrt(degree[i] * degree[j]) for (i, j), r in relation.items()}


def to_pairs(edges: Edges) -> dict[tuple[int, int], float]:
    """The relation of each pair of a reader and its source."""
    triples = zip(edges.reader, edges.source, edges.value, strict=True)
    return {(i, j): value for i, j, value in triples}


def augmented_heads(heads: list[Edges], mix: Tensor, value: Tensor) -> Tensor:
    """Equations 6 to 8: value [m, M', e'] to H^RAH [m, M', e'], heads one by one."""
    out = torch.zeros_like(value)
    for attribute, edges in enumerate(heads):
        for (i, j), scaled in normalised(to_pairs(edges), len(value)).items():
            for head in range(value.size(1)):  # the mixture of equation 8
                out[i, head] += mix[attribute, head] * scaled * value[j, head]
    return out


def smoothed(edges: Edges, own: list[float], unknown: float, x: Tensor) -> Tensor:
    """Section 3.1.3: Norm(R^U) Flatten(H), with what each user is to itself (0: no attribute)."""
    relation = {(i, i): value or unknown for i, value in enumerate(own)} | to_pairs(edges)
    out = torch.zeros_like(x)
    for (i, j), scaled in normalised(relation, len(x)).items():
        out[i] += scaled * x[j]
    return out


@pytest.mark.parametrize(
    ("user_layers", "update"), [("odd", "gated"), ("even", "replace"), ("none", "gated")]
)
@torch.no_grad()
def test_layers_equal_the_equations(folder: Path, double, user_layers: str, update: str) -> None:
    """Equations 2 to 9 and section 3.1.3 with attributes of every kind, layer by layer."""
    read = {} if user_layers == "none" else {"user_update": update}
    made = open_shop(folder, user_layers=user_layers, **read, position=["nope"])
    model, rows = shaken(made), all_windows(made)
    order, heads, users = find(model, rows)
    assert all(len(edges.value) for edges in [*heads, users])
    assert (places(rows)[users.reader] == places(rows)[users.source]).all()
    x = model.item_embedding(torch.from_numpy(model.lookup.items[rows.events]))
    table = model.lookup.user_table
    own = table.self_relation[table.class_of[order.user]].tolist()
    assert 0 in own  # a user without attributes
    ends = np.cumsum(rows.lengths)
    for number, layer in enumerate(model.trm_encoder.layer, 1):
        attention = layer.multi_head_attention
        h = reference.layer_norm(x, attention.LayerNorm)
        value = attention.relation_value(h).view(len(h), attention.num_relation_heads, -1)
        augmented = augmented_heads(heads, attention.relation_mix, value)
        mixed, e = torch.zeros_like(h), attention.head_size
        for row in (slice(end - n, end) for end, n in zip(ends, rows.lengths, strict=True)):
            for part in (slice(k * e, (k + 1) * e) for k in range(attention.n_heads)):
                q, k, v = (getattr(attention, name)(h[row]) for name in ("query", "key", "value"))
                parts = (y[:, part] for y in (q, k, v))
                mixed[row, part] = reference.dot_product_attention(*parts)
        joined = torch.cat((mixed, augmented.flatten(1)), 1)
        output = torch.cat((attention.dense.weight, attention.relation_dense.weight), 1)
        x = x + joined @ output.t() + attention.dense.bias  # equation 9: one W^O for all heads
        x = layer.feed_forward(x)
        if {"odd": number % 2 == 1, "even": number % 2 == 0, "none": False}[user_layers]:
            smooth = smoothed(users, own, update == "replace", x)
            x = x + layer.user_gate * smooth if update == "gated" else smooth
    want = reference.layer_norm(x, model.LayerNorm)
    torch.testing.assert_close(encode(model, rows), want, rtol=1e-9, atol=1e-9)


def test_sparse_equals_dense(double) -> None:
    """Product and gradient, with empty rows and columns."""
    rng = np.random.default_rng(0)
    row, col = np.nonzero(rng.random((30, 11)) < 0.2)
    weight = rng.normal(size=len(row))
    product = SparseProduct.build(row, col, weight, (33, 12), torch.device("cpu"), torch.float64)
    dense = torch.zeros(33, 12)
    dense[row, col] = torch.from_numpy(weight)
    x = torch.randn(12, 5, requires_grad=True)
    torch.testing.assert_close(product(x), dense @ x)
    assert torch.autograd.gradcheck(product, x)


def test_the_loss_of_a_batch_is_equation_17(folder: Path, double) -> None:
    """Futures reach over the borders of windows, and end with the training part."""
    made = open_shop(folder, future_weights=[1.0, 0.25, 0.25], prior_weight=0.5)
    model, log, part = shaken(made), made.dataset.log, made.dataset.part
    counts = np.bincount(log.items.numpy()[part == TRAIN], minlength=model.n_items).tolist()
    loader = made.trainer.training_loader(made.loaders["train"])
    batch = loader.gather(np.concatenate(loader._get_batches()))
    futures, users = [], log.users.tolist()
    for event in batch.log_rows.tolist():
        ahead = range(event + 1, min(event + 4, len(log)))
        same = [e for e in ahead if users[e] == users[event] and part[e] == TRAIN]
        futures.append([int(log.items[e]) for e in same])
    assert {len(future) for future in futures} == {1, 2, 3}
    hidden = encode(model, all_windows(made))
    vectors = model.item_embedding.weight
    want = reference.posterior(hidden, vectors, futures, [1.0, 0.25, 0.25], counts, 0.5)
    torch.testing.assert_close(model.window_loss(batch), want)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_without_relations_it_is_the_backbone(folder: Path, double, norm: str) -> None:
    """The weights of PosSASRec load strictly; states, scores and loss are the same numbers."""
    made = open_shop(folder, relations=[], norm=norm, chunking=False, **PLAIN)
    model = shaken(made)
    keys = ("load_col", "filter_inter_by_user_or_item", "length_pool", "norm")
    keys += tuple(key for key in SIZES if "relation" not in key and key != "top_k")
    given = {key: made.config[key] for key in keys} | {"data_path": str(folder)}
    base = prepare(PosConfig("PosSASRec", "shop", None, given))
    base.model.double().eval().load_state_dict(model.state_dict())
    rows = made.loaders["test"]._dataset[np.arange(10)]
    assert torch.equal(model.full_sort_predict(rows), base.model.full_sort_predict(rows))
    loaders = [m.trainer.training_loader(m.loaders["train"]) for m in (made, base)]
    for mine, other in zip(*loaders, strict=True):
        assert torch.equal(mine.items, other.items)
        assert model.window_loss(mine) == base.model.window_loss(other)


SLIDING = {"train_windows": "sliding", "window_stride": 2}


@pytest.mark.parametrize("options", [SLIDING, {"augmentation": "prefix"}], ids=str)
def test_an_event_in_several_rows_is_read_once(folder: Path, monkeypatch, options: dict) -> None:
    """In the row where it has its target: elsewhere it would count once for every row."""
    made = open_shop(folder, cross_sequence="time_respecting", chunking=False, **options)
    lookup, seen = made.model.train().lookup, []
    relations = lookup.build_relations
    monkeypatch.setattr(lookup, "build_relations", lambda r, *a: seen.append(r) or relations(r, *a))
    loss = made.trainer.adapter.choose_loss(made.loaders["train"].packed)
    for batch in made.loaders["train"]:
        loss(batch)
        if options is SLIDING:
            target = batch.log_rows[batch.queries].numpy() + 1
            assert (lookup.items[target] == batch.targets.numpy()).all()
    read = np.concatenate([rows.events[rows.is_source] for rows in seen])
    every = np.concatenate([rows.events for rows in seen])
    assert len(every) > len(np.unique(every))
    targets = lookup.is_trained & (lookup.ranks > 0)
    np.testing.assert_array_equal(np.sort(read) + 1, np.flatnonzero(targets))


@pytest.mark.parametrize("length", [1, 5])
def test_chunks_lose_and_repeat_no_event(folder: Path, length: int) -> None:
    """All windows of a user come in one batch, in order; in prediction the whole history."""
    made = open_shop(folder, MAX_ITEM_LIST_LENGTH=length, train_batch_size=3)
    log, part, lookup = made.dataset.log, made.dataset.part, made.model.lookup
    seen, met = [], set()
    for batch in made.trainer.training_loader(made.loaders["train"]):
        events, users = batch.log_rows.numpy(), log.users[batch.log_rows].numpy()
        assert batch.lengths.max() <= length
        assert (np.diff(events)[users[1:] == users[:-1]] == 1).all()
        assert met.isdisjoint(users.tolist())
        seen += events.tolist()
        met.update(users.tolist())
    trained = np.flatnonzero(part == TRAIN)
    is_newest = np.append(np.diff(log.users.numpy()[trained]) > 0, True)  # a target alone
    assert sorted(seen) == trained[~is_newest].tolist()
    target = made.loaders["test"]._dataset.inter_feat.target.numpy()
    start = log.offsets[log.users.numpy()[target]]
    rows = lookup.pack_histories(start, target, is_bank=False)
    chain = np.repeat(rows.sequence, rows.lengths)
    for number, (begin, end) in enumerate(zip(start, target, strict=True)):
        assert rows.events[chain == number].tolist() == list(range(begin, end))
        lengths = rows.lengths[rows.sequence == number]
        assert (lengths[1:] == length).all() and lengths[0] <= length


def test_only_windows_that_follow_each_other_are_linked(folder: Path) -> None:
    """Neither the first interactions of the next user, nor windows with a gap between them."""
    lookup = open_shop(folder).model.lookup
    user = np.flatnonzero(np.diff(lookup.offsets) >= 6)[0]
    start, end = lookup.offsets[user : user + 2]

    def link(*spans: tuple[int, int]) -> list[int]:
        events = np.concatenate([np.arange(*span) for span in spans])
        lengths = np.array([high - low for low, high in spans])
        return lookup.pack_windows(events, lengths, events >= 0, linked=True).sequence.tolist()

    assert link((start, start + 2), (start + 2, start + 5)) == [0, 0]
    assert link((start, start + 2), (start + 3, start + 5)) == [0, 1]
    assert link((start, end), (end, end + 1)) == [0, 1]


BANK = {"relations": ["brand", "tags"], "inference_relations": "training_bank", "bank_size": 7}


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "is_equal"),
    [
        ({"relations": ["brand", "tags", "time", "position"], "inference_relations": "own"}, True),
        ({"relations": RELATIONS, "inference_relations": "own"}, False),  # users' age is missing
        ({**BANK, "cross_sequence": "random_order", "chunking": False}, True),
        ({**BANK, "cross_sequence": "time_respecting", "chunking": False}, True),
    ],
    ids=str,
)
def test_histories_equal_the_log(tmp_path: Path, double, options: dict, is_equal: bool) -> None:
    """By items, order and times. A window reads the bank at its place in the whole history."""
    made = open_shop(write(tmp_path, tables(users=40)), **options)
    model, lookup = shaken(made), made.model.lookup
    rows = made.loaders["test"]._dataset[:]
    if model.inference == "training_bank":  # users in it would read their own windows there
        rows = rows[~np.isin(rows["user_id"], model.bank_users)]
    target = rows[TARGET_EVENT].numpy()
    lengths = lookup.ranks[target]
    assert (lengths > SIZES["MAX_ITEM_LIST_LENGTH"]).sum() > 9
    events = np.concatenate([np.arange(t - n, t) for t, n in zip(target, lengths, strict=True)])
    times, items = map(torch.from_numpy, (lookup.times[events], lookup.items[events]))
    found = model.encode(model.make_batch(items, torch.from_numpy(lengths), times))
    same = torch.isclose(found, model.compute_states(rows), rtol=1e-9, atol=1e-12).all()
    assert found.isfinite().all() and same == is_equal


@torch.no_grad()
@pytest.mark.parametrize("read", ["relations", "cross_sequence"])
def test_recommendations_read_the_times_of_given_histories(folder: Path, read: str) -> None:
    """A history without times is refused by a model that reads them, and only there."""
    options: dict = {"relations": ["time"], "inference_relations": "own"}
    if read == "cross_sequence":
        options = {"relations": ["brand"], "inference_relations": "training_bank"}
        options |= {"cross_sequence": "time_respecting", "bank_size": 14}
    made = open_shop(folder, **options)
    shaken(made)
    trained = Recommender(made)

    def encode(**given: list) -> np.ndarray:
        return trained.encode([{"items": ["i1", "i2"], **given}])

    before_and_after_all_others = encode(times=[1.4e9, 1.6e9])
    assert not np.allclose(before_and_after_all_others, encode(times=[1.4e9, 1.4e9]))
    with pytest.raises(UsageError, match="times"):
        encode()
    made.model.inference = "none" if read == "relations" else "batch"  # no other user is read
    assert encode().any()


def test_times_that_stand_still_are_no_clock(tmp_path: Path) -> None:
    """Of all, or of a user: sessions with the time of their day have an order among them."""
    made, given = tables(), {"relations": ["brand"], "position": ["nope"]}
    across, timed = {**given, "cross_sequence": "time_respecting"}, {**given, "relations": ["time"]}
    times = made["inter"].groupby("user_id:token")["timestamp:float"]
    made["inter"]["timestamp:float"] = times.transform("min")
    folder = write(tmp_path, made)
    open_shop(folder, **across)
    with pytest.raises(UsageError, match="leave the time out of relations$"):
        open_shop(folder, **timed)
    made["inter"]["timestamp:float"] = 5.0
    with pytest.raises(UsageError, match="cross_sequence: random_order"):
        open_shop(write(tmp_path, made), **across)


def test_training_starts_at_the_mean_of_relations_and_without_other_users(folder: Path) -> None:
    for layer in open_shop(folder).model.trm_encoder.layer:
        mix = layer.multi_head_attention.relation_mix
        assert torch.equal(mix, torch.full_like(mix, 1 / 8))
        assert layer.user_gate is None or layer.user_gate == 0


def test_every_parameter_has_a_gradient(folder: Path) -> None:
    """Whatever prediction reads, training reads relations; as with ``enable_amp``."""
    made = open_shop(folder, **PLAIN, inference_relations="none")
    batch = next(iter(made.trainer.training_loader(made.loaders["train"])))
    made.model.train()
    with torch.autocast("cpu"):
        made.model.window_loss(batch).backward()
    for name, p in made.model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.any(), name
