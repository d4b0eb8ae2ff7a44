"""AttrFormer's rules that equations and gradients do not show: who is read, and by what clock."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from recbole.data.interaction import Interaction
from shop import (
    RELATIONS,
    Cells,
    all_windows,
    find,
    open_shop,
    places,
    shaken,
    tables,
    train,
    write,
)
from torch import Tensor

from recbole_pos.data.splits import TEST
from recbole_pos.data.windows import TARGET_EVENT
from recbole_pos.experiment.build import Experiment
from recbole_pos.model import attrformer
from recbole_pos.relations.lookup import Rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("shop"), tables())


class _Mean:
    """A generator that draws the mean."""

    def gamma(self, shape: np.ndarray) -> np.ndarray:
        return shape.astype(float)


def first_batch(made):
    return next(iter(made.trainer.training_loader(made.loaders["train"])))


def product(made, rows: Rows) -> torch.Tensor:
    """Norm(R_1) x of the first attribute, for some x."""
    rng, m = np.random.default_rng(0), len(rows.events)
    found = made.model.lookup.relations(rows, rng, torch.device("cpu"), torch.float64)
    return found.heads(torch.arange(1.0, m + 1, dtype=torch.float64)[:, None])[:m]


def test_an_attribute_does_not_weigh_on_another(folder: Path) -> None:
    """Equation 6 normalises each relation by itself: more of them leave its weights as they are."""
    one, both = (open_shop(folder, relations=r) for r in (["brand"], RELATIONS))
    rows = all_windows(one)
    alone = product(one, rows)
    assert alone.count_nonzero() > 5
    torch.testing.assert_close(product(both, rows), alone, rtol=0, atol=0)


def test_heads_start_as_the_mean_of_all_relations(folder: Path) -> None:
    for layer in open_shop(folder).model.trm_encoder.layer:
        mix = layer.multi_head_attention.relation_mix
        assert torch.equal(mix, torch.full_like(mix, 1 / 8))


def test_users_are_read_at_the_same_place_from_the_oldest_event(folder: Path) -> None:
    """Section 3.1.3: every earlier event of another user of the country, in windows of any length.

    Counted from the newest event the pairs would be others.
    """
    made = open_shop(folder, relations=["country"], top_k=1000)
    rows, cells = all_windows(made), Cells(made.dataset, tables())
    order, _, users = find(made.model, rows)
    place, country = places(rows), [cells.of("user", u, "country") for u in order.user]
    left = np.concatenate([np.arange(length)[::-1] for length in rows.lengths])
    events = range(len(place))
    want = {
        (i, j)
        for i in events
        for j in events
        if order.user[i] != order.user[j] and place[i] == place[j]
        if country[i] == country[j] is not None and order.rank[j] < order.rank[i]
    }
    pairs = zip(users.reader.tolist(), users.source.tolist(), strict=True)
    assert {(i, j) for i, j in pairs if order.user[i] != order.user[j]} == want
    assert any(left[i] != left[j] for i, j in want)


def test_training_reads_relations_whatever_prediction_reads(folder: Path) -> None:
    made = open_shop(folder, inference_relations="none")
    made.model.train().window_loss(first_batch(made)).backward()
    for layer in made.model.trm_encoder.layer:
        assert layer.multi_head_attention.relation_mix.grad.abs().sum() > 0


def test_every_training_batch_has_a_clock_of_its_own(folder: Path) -> None:
    """No other chance is in the model; predictions have one clock."""
    made = open_shop(folder, train_batch_size=100)
    model, batch = shaken(made), first_batch(made)
    with torch.no_grad():
        assert model.window_loss(batch) == model.window_loss(batch)
        model.train()
        assert len({float(model.window_loss(batch)) for _ in range(4)}) > 1


def test_predictions_stand_at_the_mean_of_the_training_clock(folder: Path) -> None:
    """Event number n of a row to predict from, and event n of the bank, drawn at its mean."""
    lookup = open_shop(folder).model.lookup
    users = np.flatnonzero(np.diff(lookup.offsets) > 7)
    start = lookup.offsets[users]
    rows = lookup.histories(start, start + 7, bank=False) + lookup.bank(users)
    order = lookup.order(rows, _Mean())
    asked = rows.last[np.repeat(np.arange(len(rows.lengths)), rows.lengths)]
    place = lookup.ranks[rows.events]
    by_place = {place[i]: order.rank[i] for i in np.flatnonzero(~asked)}
    shared = [i for i in np.flatnonzero(asked) if place[i] in by_place]
    assert len(shared) > 5
    assert all(order.rank[i] == by_place[place[i]] for i in shared)


def test_the_bank_holds_the_newest_training_events(folder: Path) -> None:
    lookup = open_shop(folder).model.lookup
    users = np.flatnonzero(lookup.train_end - lookup.offsets[:-1] > lookup.max_length)
    rows = lookup.bank(users)
    assert len(users) > 2
    want = lookup.train_end[users][:, None] - np.arange(lookup.max_length, 0, -1)
    np.testing.assert_array_equal(rows.events, want.reshape(-1))


def test_numbers_of_events(folder: Path) -> None:
    """The time relation counts seconds, whatever the unit; numbers reach a window back."""
    seconds, days = (
        open_shop(folder, timestamp_unit=unit).model.lookup.heads for unit in ("seconds", "days")
    )
    time = [
        relation.get("field") if isinstance(relation, dict) else relation for relation in RELATIONS
    ]
    place = time.index("time")
    np.testing.assert_allclose(days[place].values, 86_400 * seconds[place].values)
    assert seconds[place].longest == seconds[time.index("stars")].longest == 5


@pytest.mark.parametrize(
    "options",
    [
        {"chunking": False, "train_windows": "sliding", "window_stride": 2},
        {"chunking": False, "augmentation": "prefix"},
    ],
    ids=str,
)
def test_an_event_in_several_rows_is_read_once(folder: Path, monkeypatch, options: dict) -> None:
    """In the row where it has its target: elsewhere it would count once for every row."""
    made = open_shop(folder, cross_sequence="time_respecting", **options)
    model, lookup, seen = made.model, made.model.lookup, []
    relations = lookup.relations
    monkeypatch.setattr(lookup, "relations", lambda r, *a: seen.append(r) or relations(r, *a))
    model.train()
    loss = made.trainer.adapter.loss(made.loaders["train"].packed)
    for batch in made.loaders["train"]:
        loss(batch)
    read = np.concatenate([rows.events[rows.source] for rows in seen])
    every = np.concatenate([rows.events for rows in seen])
    assert len(every) > len(np.unique(every))
    assert len(read) == len(np.unique(read))
    targets = lookup.trained & (lookup.ranks > 0)
    np.testing.assert_array_equal(np.sort(read) + 1, np.flatnonzero(targets))


@pytest.mark.parametrize("inference", ["batch", "training_bank", "own", "none"])
def test_long_histories_are_predicted_part_by_part(
    folder: Path, monkeypatch, inference: str
) -> None:
    """With the same neighbours, so nothing changes."""
    made = open_shop(folder, inference_relations=inference)
    model, seen = shaken(made), []
    states = model.row_states
    monkeypatch.setattr(model, "row_states", lambda r, *a: seen.append(r) or states(r, *a))
    rows = made.loaders["test"]._dataset[list(range(6))]
    with torch.no_grad():
        whole = model.states_of(rows)
        monkeypatch.setattr(attrformer, "MOST_EVENTS", 8)
        parts = model.states_of(rows)
    asked = [int(r.lengths[r.last].sum()) for r in seen]
    assert len(asked) > 3 and asked[0] == sum(asked[1:])
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)


def test_a_batch_is_of_random_windows(folder: Path) -> None:
    """As a batch of predictions is: neighbours of all lengths, about as many for everyone."""
    loader = (made := open_shop(folder, chunking=False)).trainer.training_loader(
        made.loaders["train"]
    )
    sizes = [len(batch) for batch in loader._batches()]
    assert len(sizes) > 3
    assert max(sizes) - min(sizes) <= 1


def test_the_clock_counts_events_that_are_not_in_the_batch(folder: Path) -> None:
    lookup = open_shop(folder).model.lookup
    user = np.flatnonzero(np.diff(lookup.offsets) >= 6)[0]
    events = lookup.offsets[user] + np.array([1, 4, 5])
    assert lookup._random_clock(events, _Mean()).tolist() == [2, 5, 6]


def test_future_weights_without_a_prior(folder: Path) -> None:
    plain = {"prior_weight": 0.0}
    assert open_shop(folder, **plain, future_weights=[1.0, 0.5]).model.betas == [1.0, 0.5]
    made = open_shop(folder, **plain, future_weights=[1.0, 0.0], loss_type="SCE")
    assert made.model.betas == [1.0]


def test_targets_of_windows_with_context(folder: Path) -> None:
    made = open_shop(folder, chunking=False, train_windows="sliding", window_stride=2)
    items = made.model.lookup.items
    batches = list(made.trainer.training_loader(made.loaders["train"]))
    assert any(batch.positions is not None for batch in batches)
    for batch in batches:
        _, _, target, want = made.model.window_rows(batch)
        assert torch.equal(items[torch.from_numpy(target)], want)


def test_the_bank_is_of_users_with_training_events(folder: Path) -> None:
    bank = {"inference_relations": "training_bank", "bank_size": 10**6}
    made = open_shop(folder, **bank, eval_args={"split": {"GT": [0.3, 0.6]}})
    lookup = made.model.lookup
    having = np.flatnonzero(lookup.train_end > lookup.offsets[:-1])
    assert len(having) < (np.diff(lookup.offsets) > 0).sum()
    assert made.model.bank_users.tolist() == having.tolist()


def test_relation_values_have_the_bias_of_attention(folder: Path) -> None:
    layer = open_shop(folder, attention_bias=False).model.trm_encoder.layer[0].multi_head_attention
    assert layer.relation_value.bias is None and layer.query.bias is None


def rows_of_targets(made: Experiment, target: list[int]) -> Interaction:
    """Rows that predict events of the log, as far as they go back in a window."""
    lookup, at = made.model.lookup, torch.tensor(target)
    place = at - torch.from_numpy(lookup.offsets)[lookup.users[at]]
    lengths = place.clamp(max=made.model.max_seq_length)
    return Interaction({TARGET_EVENT: at, made.model.ITEM_SEQ_LEN: lengths})


def test_rows_of_training_and_test_together(folder: Path) -> None:
    """A row of training then reads no bank: its own later events are in that."""
    made = open_shop(folder, inference_relations="training_bank", bank_size=10**6)
    model, lookup = shaken(made), made.model.lookup
    held = np.flatnonzero(made.dataset.part == TEST)[-1]
    user = np.flatnonzero(lookup.train_end - lookup.offsets[:-1] >= 6)[0]
    assert lookup.users[held] != user
    row = lookup.offsets[user] + 3
    rows = rows_of_targets(made, [row, held])

    def states() -> list[Tensor]:
        """Of the first row, under several draws of the clock."""
        found = []
        for model.seed in range(20):
            found.append(model.states_of(rows)[0])
        return found

    before = states()
    later = slice(row, lookup.train_end[user])
    lookup.items[later] = lookup.items[later] % (model.n_items - 1) + 1
    for one, other in zip(before, states(), strict=True):
        assert torch.equal(one, other)


def test_rows_that_follow_each_other_are_not_linked(folder: Path) -> None:
    """A state would depend on which rows are beside it."""
    made = open_shop(folder)
    lookup, longest = made.model.lookup, made.model.max_seq_length
    user = np.flatnonzero(lookup.train_end - lookup.offsets[:-1] > 2 * longest)[0]
    start = lookup.offsets[user]
    rows, _ = made.model.prefix_rows(rows_of_targets(made, [start + longest, start + 2 * longest]))
    assert rows.chain.tolist() == [0, 1]


def test_predictions_where_some_users_have_no_training_events(folder: Path, double) -> None:
    """The bank of a batch of such users alone is empty."""
    made = open_shop(folder, inference_relations="batch", eval_args={"split": {"GT": [0.3, 0.5]}})
    model, lookup = shaken(made), made.model.lookup
    data, alone = made.loaders["test"]._dataset, 0
    for n in range(len(data)):
        row = data[[n]]
        user = lookup.users[row[TARGET_EVENT].numpy()]
        alone += int((lookup.train_end[user] == lookup.offsets[user]).all())
        with torch.inference_mode():
            assert model.states_of(row).isfinite().all()
    assert 0 < alone < len(data)


@torch.no_grad()
def test_times_of_positions_are_in_seconds(folder: Path, double) -> None:
    """Days that count days: the states of a log that counts seconds."""
    states, rows = [], None
    for unit, scale in (("days", 1), ("seconds", 86_400), ("seconds", 1)):
        made = open_shop(folder, relations=["brand"], position=["time_rope"], timestamp_unit=unit)
        torch.manual_seed(0)
        model = shaken(made)
        rows = rows or all_windows(made)
        model.lookup.times = (model.lookup.times - model.lookup.times.min()) * scale
        states.append(model.row_states(rows, None))
    assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])


def test_training_under_autocast(folder: Path) -> None:
    """As ``enable_amp`` trains: the sparse products take the type of the states."""
    made = open_shop(folder)
    batch = first_batch(made)
    losses = []
    for enabled in (True, False):
        torch.manual_seed(0)
        made.model.zero_grad()
        with torch.autocast("cpu", enabled=enabled):
            losses.append(made.model.window_loss(batch))
        losses[-1].backward()
        for layer in made.model.trm_encoder.layer:
            grad = layer.multi_head_attention.relation_mix.grad
            assert grad.isfinite().all() and grad.any()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=0.05)


def test_what_users_share_is_learnt_through(folder: Path, double) -> None:
    """The gradient goes back through Norm(R^U) H (section 3.1.3) to the events that are read."""
    made = open_shop(folder, relations=["country", "age"], n_layers=1, position=["nope"])
    model, rows = shaken(made), all_windows(made)
    order, _, users = find(model, rows)
    leaf = torch.randn(len(rows.events), model.item_embedding.weight.size(1), requires_grad=True)
    model.item_embedding.forward = lambda items: leaf
    reader, source = users.reader[0], users.source[0]
    assert order.user[reader] != order.user[source]
    (grad,) = torch.autograd.grad(model.row_states(rows, None)[reader].square().sum(), leaf)
    assert grad[source].any()


@pytest.mark.parametrize("augmentation", ["prefix", "none"])
def test_rows_of_recbole_train_it_too(folder: Path, tmp_path: Path, augmentation: str) -> None:
    given = {"augmentation": augmentation, "chunking": False, "epochs": 1}
    assert train(folder, tmp_path / "run", **given).epochs == 1


@pytest.mark.parametrize("split", [{"GT": [0.7, 0.85]}, {"RS": [6, 2, 2]}], ids=str)
def test_other_splits(folder: Path, tmp_path: Path, split: dict) -> None:
    """Several held-out targets of a user in one batch."""
    assert train(folder, tmp_path / "run", eval_args={"split": split}).epochs == 3
