"""No leakage: who may read whom, by gradient and by changing what must not matter.

Every rule has a test here that fails when the rule is taken out of ``RelationLookup.order``, of the
search, of the degrees, of the bank or of the targets.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shop import all_windows, open_shop, shaken, tables, write
from torch import Tensor

from recbole_pos.data.splits import TEST, TRAIN
from recbole_pos.data.windows import TARGET_EVENT
from recbole_pos.relations.lookup import Rows

pytestmark = pytest.mark.usefixtures("double")
CLOCKS = ["random_order", "time_respecting", "none"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("shop"), tables())


def influence(model, rows: Rows) -> np.ndarray:
    """[m, m] bool: the state at the row has a gradient to the input of the column."""
    leaf = torch.randn(len(rows.events), model.item_embedding.weight.size(1), requires_grad=True)
    model.item_embedding.forward = lambda items: leaf
    hidden = model.row_states(rows, None)
    del model.item_embedding.forward
    seen = []
    for i in range(len(hidden)):
        (grad,) = torch.autograd.grad(
            hidden[i] @ torch.randn_like(hidden[i]), leaf, retain_graph=True
        )
        seen.append((grad != 0).any(1).numpy())
    return np.stack(seen)


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize(
    "windows",
    [{}, {"chunking": False}, {"chunking": False, "train_windows": "sliding", "window_stride": 2}],
    ids=str,
)
def test_no_gradient_to_a_later_event_of_the_same_user(folder: Path, clock: str, windows) -> None:
    """Through three layers, other users, other chunks, and the aggregation by users."""
    made = open_shop(folder, cross_sequence=clock, **windows)
    model, rows = shaken(made), all_windows(made)
    seen, lookup = influence(model, rows), made.model.lookup
    user, time = lookup.users[rows.events], lookup.times[rows.events]
    same = user[:, None] == user
    later = rows.events[None, :] > rows.events[:, None]
    assert not seen[same & later].any()
    assert seen[np.eye(len(seen), dtype=bool)].all()
    across = seen[~same]
    assert across.any() == (clock != "none")
    if clock == "time_respecting":
        assert not seen[~same & (time[None, :] >= time[:, None])].any()
    if clock == "random_order":  # both ways between users, each event one way at most
        assert not (seen & seen.T & ~same).any()
        pair = np.zeros((user.max() + 1, user.max() + 1), dtype=bool)
        reader, source = np.nonzero(seen)
        pair[user[reader], user[source]] = True
        np.fill_diagonal(pair, False)
        assert (pair & pair.T).any()
    chunk = np.repeat(np.arange(len(rows.lengths)), rows.lengths)
    other_chunk = same & (chunk[:, None] != chunk)
    if not windows:  # linked chunks do read the earlier ones
        assert seen[other_chunk & ~later].any()


@pytest.mark.parametrize("clock", CLOCKS)
def test_changing_what_comes_later_changes_nothing_before_it(folder: Path, clock: str) -> None:
    """Values, top-K and degrees: other items in a user's future leave the past as it was, exactly.

    Gradients do not see degrees and choices; this does.
    """
    made = open_shop(folder, cross_sequence=clock)
    model, rows = shaken(made), all_windows(made)
    lookup = model.lookup
    order = lookup.order(rows, np.random.default_rng(model.seed))
    users, counts = np.unique(order.user, return_counts=True)
    rng, changed_others = np.random.default_rng(0), 0
    with torch.inference_mode():
        want = model.row_states(rows, None)
        for user in users[counts >= 4]:
            own = np.flatnonzero(order.user == user)
            cut = own[len(own) // 2]
            future = torch.from_numpy(rows.events[own[own >= cut]])
            kept = lookup.items[future].clone()
            lookup.items[future] = torch.from_numpy(rng.integers(1, model.n_items, len(future)))
            got = model.row_states(rows, None)
            lookup.items[future] = kept
            before = np.zeros(len(order), dtype=bool)
            before[own[own < cut]] = True
            # and whoever stands before them on the clock
            before |= (order.user != user) & (order.rank <= order.rank[cut])
            assert torch.equal(got[before], want[before])
            changed_others += int((got != want).any(1)[torch.from_numpy(order.user != user)].sum())
    assert (changed_others > 0) == (clock != "none")


def test_the_clock_of_an_event_does_not_know_how_many_follow(folder: Path) -> None:
    """Without the events after it, its time is what it was."""
    made = open_shop(folder)
    model, rows = shaken(made), all_windows(made)
    lookup = model.lookup
    short = lookup.windows(*_without_newest(rows, lookup), linked=True)
    stay = np.isin(rows.events, short.events)
    clocks = [lookup._random_clock(r.events, _Halves()) for r in (rows, short)]
    np.testing.assert_array_equal(clocks[0][stay], clocks[1])


class _Halves:
    """A generator whose draws say where they are asked for."""

    def gamma(self, shape: np.ndarray) -> np.ndarray:
        return shape * 0.5


def _without_newest(rows: Rows, lookup) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows without the newest event of each user, where a row keeps at least one."""
    last = np.cumsum(rows.lengths) - 1
    user = lookup.users[rows.events[last]]
    newest = np.append(user[1:] != user[:-1], True) & (rows.lengths > 1)
    keep = np.ones(len(rows.events), dtype=bool)
    keep[last[newest]] = False
    return rows.events[keep], rows.lengths - newest, rows.source[keep]


def test_held_out_events_never_reach_another_user(folder: Path) -> None:
    """Rows of test histories hold validation events; even as sources nobody else reads them."""
    made = open_shop(folder, inference_relations="batch")
    model = shaken(made)
    lookup = model.lookup
    target = made.loaders["test"]._dataset.inter_feat.target.numpy()
    start = lookup.offsets[lookup.users[target]]
    rows = lookup.histories(start, target, bank=True)  # as if they were there to be read
    seen = influence(model, rows)
    user, held_out = lookup.users[rows.events], ~lookup.trained[rows.events]
    assert held_out.sum() > 5
    other = user[:, None] != user
    assert not seen[:, held_out][other[:, held_out]].any()
    assert seen[other].any()


@pytest.mark.parametrize("inference", ["batch", "training_bank", "own", "none"])
@pytest.mark.parametrize("phase", ["valid", "test"])
def test_predictions_read_training_events_of_others_alone(
    folder: Path, inference: str, phase: str
) -> None:
    """Every other user's held-out event is changed; no prediction changes."""
    made = open_shop(folder, inference_relations=inference)
    model, lookup = shaken(made), made.model.lookup
    rows = made.loaders[phase]._dataset[np.arange(len(made.loaders[phase]._dataset))]
    part = made.dataset.part
    bank = lookup.bank(np.arange(len(lookup.offsets) - 1))
    assert lookup.trained[bank.events].all() and bank.source.all() and len(bank.events) > 20
    with torch.inference_mode():
        want = model.states_of(rows)
        for place in range(0, len(rows), 3):
            user = lookup.users[rows[TARGET_EVENT][place]]
            other = torch.from_numpy((part != TRAIN) & (lookup.users != user))
            later = torch.from_numpy(np.arange(len(part)) >= int(rows[TARGET_EVENT][place]))
            later &= torch.from_numpy(lookup.users == user)
            kept = lookup.items.clone()
            lookup.items[other | later] = 1 + lookup.items[other | later] % (model.n_items - 1)
            got = model.states_of(rows)
            lookup.items.copy_(kept)
            assert torch.equal(got[place], want[place])


@pytest.mark.parametrize(
    ("inference", "reads_others"),
    [("batch", True), ("training_bank", True), ("own", False), ("none", False)],
)
def test_whom_a_prediction_depends_on(folder: Path, inference: str, reads_others: bool) -> None:
    made = open_shop(folder, inference_relations=inference)
    model, lookup = shaken(made), made.model.lookup
    rows = made.loaders["test"]._dataset[np.arange(len(made.loaders["test"]._dataset))]
    with torch.inference_mode():
        together = model.states_of(rows)
        again = model.states_of(rows)
        alone = torch.cat([model.states_of(rows[i : i + 1]) for i in range(len(rows))])
        kept = lookup.items.clone()
        user = int(lookup.users[rows[TARGET_EVENT][0]])
        other = torch.from_numpy(lookup.users != user)
        lookup.items[other] = 1 + lookup.items[other] % (model.n_items - 1)
        changed = model.states_of(rows[0:1] if inference == "training_bank" else rows)
        lookup.items.copy_(kept)
    assert torch.equal(together, again)
    assert torch.allclose(together, alone, atol=1e-9) == (inference != "batch")
    assert torch.allclose(changed[0], together[0], atol=1e-9) == (not reads_others)


def rows_that_move(model: Any, rows: Any, places: range, later: Callable[[int], np.ndarray]) -> int:
    """Other items where ``later(target)`` says so: the row of the target does not move.

    Returns:
        how often another row did.
    """
    items, moved = model.lookup.items, 0
    with torch.inference_mode():
        want = model.states_of(rows)
        for place in places:
            events = torch.from_numpy(later(int(rows[TARGET_EVENT][place])))
            kept = items.clone()
            items[events] = 1 + items[events] % (model.n_items - 1)
            got = model.states_of(rows)
            items.copy_(kept)
            assert torch.equal(got[place], want[place])
            moved += int(not torch.equal(got, want))
    return moved


def test_time_respecting_predictions_read_nothing_that_happened_later(folder: Path) -> None:
    made = open_shop(folder, inference_relations="training_bank", cross_sequence="time_respecting")
    model, lookup = shaken(made), made.model.lookup
    rows = made.loaders["test"]._dataset[np.arange(len(made.loaders["test"]._dataset))]

    def later(target: int) -> np.ndarray:
        others = lookup.users != lookup.users[target]
        return (lookup.times >= lookup.times[target - 1]) & others

    assert rows_that_move(model, rows, range(len(rows)), later) > 5


def test_rows_of_training_targets_read_each_other_as_in_training(folder: Path) -> None:
    """RecBole's rows hold prefixes of the same user: none reads a later event, no bank is asked."""
    made = open_shop(folder, inference_relations="training_bank")
    model, lookup = shaken(made), made.model.lookup
    data = made.loaders["train"]._dataset
    rows = data[np.arange(len(data))]

    def later(target: int) -> np.ndarray:
        own = lookup.users == lookup.users[target]
        return (np.arange(len(lookup.users)) >= target) & own

    assert rows_that_move(model, rows, range(0, len(rows), 5), later) > 5


def test_targets_and_prior_are_training_events(folder: Path) -> None:
    """The item after a user's last training target is held out: it has no weight."""
    made = open_shop(folder, future_weights=[1.0, 0.5, 0.25])
    model, lookup = made.model, made.model.lookup
    part, users = made.dataset.part, lookup.users
    target = np.flatnonzero((part == TRAIN) & (lookup.ranks > 0))
    items, betas = model.future(target)
    cut = 0
    for t, event in enumerate(target):
        for n, beta in enumerate([1.0, 0.5, 0.25]):
            later = event + n
            inside = later < len(users) and users[later] == users[event]
            if inside and part[later] == TRAIN:
                assert betas[t, n] == beta and items[t, n] == lookup.items[later]
            else:
                assert betas[t, n] == 0
                cut += inside
    assert cut > 5
    counts = np.bincount(lookup.items.numpy()[part == TRAIN], minlength=model.n_items)[1:]
    want = torch.from_numpy((counts + 1) / (counts + 1).sum())
    torch.testing.assert_close(model.prior[1:].double(), want, rtol=1e-6, atol=0)
    assert (part == TEST).any() and model.prior[0] == 0


def test_training_never_sees_held_out_events(folder: Path) -> None:
    """Every held-out item is changed; the loss of every batch and its gradients stay."""
    made = open_shop(folder, future_weights=[1.0, 0.5, 0.25])
    model = shaken(made)
    loader = made.trainer.training_loader(made.loaders["train"])

    def results() -> list[Tensor]:
        found = []
        for batch in loader:
            model.zero_grad()
            loss = model.window_loss(batch)
            loss.backward()
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        return found

    want = results()
    held_out = torch.from_numpy(made.dataset.part != TRAIN)
    items = model.lookup.items
    items[held_out] = 1 + items[held_out] % (model.n_items - 1)
    assert all(torch.equal(a, b) for a, b in zip(results(), want, strict=True))
    items[~held_out] = 1 + items[~held_out] % (model.n_items - 1)
    assert not torch.equal(results()[0], want[0])


def test_runs_repeat_and_differ_by_seed(folder: Path) -> None:
    """The clock of training comes from torch's generator; the bank from the seed."""

    def losses(seed: int) -> list[float]:
        made = open_shop(folder, seed=seed)
        loader = made.trainer.training_loader(made.loaders["train"])
        return [made.trainer._train_epoch(loader, epoch)["loss"] for epoch in range(2)]

    torch.set_default_dtype(torch.float32)
    assert losses(1) == losses(1) != losses(2)
    bank = {"inference_relations": "training_bank", "bank_size": 5}
    banks = [open_shop(folder, seed=s, **bank).model.bank_users.tolist() for s in (1, 1, 2)]
    assert banks[0] == banks[1] != banks[2] and len(banks[0]) == 5
