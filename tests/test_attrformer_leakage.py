"""No leakage: who may read whom, by gradient and by changing what must not matter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recbole.data.interaction import Interaction
from shop import all_windows, encode, open_shop, shaken, tables, write
from torch import Tensor

from recbole_pos.data.splits import TEST, TRAIN
from recbole_pos.data.windows import TARGET_EVENT
from recbole_pos.relations.search import PackedSequences

pytestmark = pytest.mark.usefixtures("double")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("shop"), tables())


class Draws:
    """A generator whose draws are the places they are for; at 1 they are the mean."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def gamma(self, shape: np.ndarray) -> np.ndarray:
        return shape * float(self.scale)


def influence(model, rows: PackedSequences) -> np.ndarray:
    """[m, m] bool: the state at the row has a gradient to the input of the column."""
    leaf = torch.randn(len(rows.events), model.item_embedding.weight.size(1), requires_grad=True)
    model.item_embedding.forward = lambda items: leaf
    hidden = encode(model, rows)
    del model.item_embedding.forward
    seen = []
    for i in range(len(hidden)):
        state = hidden[i] @ torch.randn_like(hidden[i])
        (grad,) = torch.autograd.grad(state, leaf, retain_graph=True)
        seen.append((grad != 0).any(1).numpy())
    return np.stack(seen)


def rows_of_phase(made, phase: str = "test") -> Interaction:
    data = made.loaders[phase]._dataset
    return data[np.arange(len(data))]


@pytest.mark.parametrize(
    ("clock", "windows"),
    [
        ("random_order", {}),
        ("time_respecting", {}),
        ("none", {"chunking": False, "train_windows": "sliding", "window_stride": 2}),
    ],
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
    assert seen[~same].any() == (clock != "none")
    if clock == "time_respecting":
        assert not seen[~same & (time[None, :] >= time[:, None])].any()
    if clock == "random_order":  # each event one way at most
        assert not (seen & seen.T & ~same).any()
    if not windows:  # linked chunks do read the earlier ones
        chunk = np.repeat(np.arange(len(rows.lengths)), rows.lengths)
        assert seen[same & (chunk[:, None] != chunk) & ~later].any()


@pytest.mark.parametrize("clock", ["random_order", "time_respecting", "none"])
def test_changing_what_comes_later_changes_nothing_before_it(folder: Path, clock: str) -> None:
    """Values, top-K and degrees: other items in a user's future leave the past as it was, exactly.

    Gradients do not see degrees and choices; this does.
    """
    made = open_shop(folder, cross_sequence=clock)
    model, rows = shaken(made), all_windows(made)
    lookup = model.lookup
    order = lookup.make_order(rows, np.random.default_rng(model.seed))
    users, counts = np.unique(order.user, return_counts=True)
    rng, changed_others = np.random.default_rng(0), 0
    with torch.inference_mode():
        want = encode(model, rows)
        for user in users[counts >= 4]:
            own = np.flatnonzero(order.user == user)
            cut = own[len(own) // 2]
            future = rows.events[own[own >= cut]]
            kept = lookup.items[future]
            lookup.items[future] = rng.integers(1, model.n_items, len(future))
            got = encode(model, rows)
            lookup.items[future] = kept
            before = np.zeros(len(order), dtype=bool)
            before[own[own < cut]] = True
            # and who is before them on that clock
            before |= (order.user != user) & (order.arrival <= order.arrival[cut])
            assert torch.equal(got[before], want[before])
            changed_others += int((got != want).any(1)[torch.from_numpy(order.user != user)].sum())
    assert (changed_others > 0) == (clock != "none")


def test_the_random_clock_of_an_event_is_the_same_without_later_ones(folder: Path) -> None:
    """It does not know how many follow."""
    made = open_shop(folder)
    rows, lookup = all_windows(made), made.model.lookup
    last = np.cumsum(rows.lengths) - 1
    user = lookup.users[rows.events[last]]
    newest = np.append(user[1:] != user[:-1], True) & (rows.lengths > 1)
    short = np.delete(rows.events, last[newest])  # without the newest event of each user
    clocks = [lookup._sample_arrival_times(events, Draws(0.5)) for events in (rows.events, short)]
    np.testing.assert_array_equal(clocks[0][np.isin(rows.events, short)], clocks[1])


def test_training_has_a_random_clock_for_each_batch(folder: Path) -> None:
    made = open_shop(folder, train_batch_size=100)
    model = shaken(made)
    batch = next(iter(made.trainer.training_loader(made.loaders["train"])))
    with torch.no_grad():  # no other chance is in the model
        assert model.window_loss(batch) == model.window_loss(batch)
        model.train()
        assert len({float(model.window_loss(batch)) for _ in range(4)}) > 1


def rows_that_move(model: Any, rows: Any, places: range, later: Callable[[int], np.ndarray]) -> int:
    """Other items at ``later(target)`` move no row of the target; how often they move another."""
    items, moved = model.lookup.items, 0
    with torch.inference_mode():
        want = model.compute_states(rows)
        for place in places:
            events = later(int(rows[TARGET_EVENT][place]))
            kept = items.copy()
            items[events] = 1 + items[events] % (model.n_items - 1)
            got = model.compute_states(rows)
            items[:] = kept
            # not to the bit: what stands beside a row decides in which order sums are made
            torch.testing.assert_close(got[place], want[place], rtol=0, atol=1e-6)
            moved += int(not torch.allclose(got, want, rtol=0, atol=1e-4))
    return moved


@pytest.mark.parametrize(("inference", "phase"), [("batch", "test"), ("training_bank", "valid")])
def test_predictions_read_only_training_of_others(folder: Path, inference: str, phase: str) -> None:
    """Every other user's held-out event is changed, and all that follows: no prediction changes."""
    made = open_shop(folder, inference_relations=inference)
    model, lookup, part = shaken(made), made.model.lookup, made.dataset.part

    def later(target: int) -> np.ndarray:
        own = lookup.users == lookup.users[target]
        return (~own & (part != TRAIN)) | (own & (np.arange(len(part)) >= target))

    rows = rows_of_phase(made, phase)
    rows_that_move(model, rows, range(0, len(rows), 3), later)


@pytest.mark.parametrize(
    ("inference", "reads_others"),
    [("batch", True), ("training_bank", True), ("own", False), ("none", False)],
)
def test_whom_a_prediction_depends_on(folder: Path, inference: str, reads_others: bool) -> None:
    made = open_shop(folder, inference_relations=inference)
    model, lookup, rows = shaken(made), made.model.lookup, rows_of_phase(made)
    with torch.inference_mode():
        together = model.compute_states(rows)
        again = model.compute_states(rows)
        alone = torch.cat([model.compute_states(rows[i : i + 1]) for i in range(len(rows))])
        kept = lookup.items.copy()
        user = int(lookup.users[rows[TARGET_EVENT][0]])
        other = lookup.users != user
        lookup.items[other] = 1 + lookup.items[other] % (model.n_items - 1)
        changed = model.compute_states(rows[0:1] if inference == "training_bank" else rows)
        lookup.items[:] = kept
    assert torch.equal(together, again)
    assert torch.allclose(together, alone, atol=1e-9) == (inference != "batch")
    assert torch.allclose(changed[0], together[0], atol=1e-9) == (not reads_others)


def test_time_respecting_predictions_read_nothing_that_happened_later(folder: Path) -> None:
    made = open_shop(folder, inference_relations="training_bank", cross_sequence="time_respecting")
    model, lookup, rows = shaken(made), made.model.lookup, rows_of_phase(made)

    def later(target: int) -> np.ndarray:
        others = lookup.users != lookup.users[target]
        return (lookup.times >= lookup.times[target - 1]) & others

    assert rows_that_move(model, rows, range(len(rows)), later) > 5


def test_rows_of_training_targets_read_each_other_as_in_training(folder: Path) -> None:
    """RecBole's rows hold prefixes of the same user: none reads a later event, no bank is asked.

    Nor where a held-out target stands beside them: their own later events are in the bank.
    """
    made = open_shop(folder, inference_relations="training_bank", bank_size=10**6)
    model, lookup = shaken(made), made.model.lookup

    def later(target: int) -> np.ndarray:
        own = lookup.users == lookup.users[target]
        return (np.arange(len(lookup.users)) >= target) & own

    rows = rows_of_phase(made, "train")
    assert rows_that_move(model, rows, range(0, len(rows), 5), later) > 5
    held = np.flatnonzero(made.dataset.part == TEST)[-1]
    user = np.flatnonzero(lookup.train_end - lookup.offsets[:-1] >= 6)[0]
    at = torch.tensor([lookup.offsets[user] + 3, held])
    lengths = torch.from_numpy(lookup.ranks[at]).clamp(max=made.model.max_seq_length)
    columns = {TARGET_EVENT: at, model.ITEM_SEQ_LEN: lengths}
    columns[model.ITEM_SEQ] = torch.ones(2, model.max_seq_length, dtype=torch.int64)  # not read
    columns[model.ITEM_ID] = torch.ones(2, dtype=torch.int64)
    rows = Interaction(columns)
    for model.seed in range(8):  # several clocks
        rows_that_move(model, rows, range(1), later)


def test_the_bank(folder: Path) -> None:
    """The newest training events, each a source, of users who have any, chosen by the seed."""
    bank = {"inference_relations": "training_bank"}
    made = open_shop(folder, **bank, bank_size=10**6, eval_args={"split": {"GT": [0.3, 0.6]}})
    lookup = made.model.lookup
    trained = np.flatnonzero(lookup.train_end > lookup.offsets[:-1])
    assert made.model.bank_users.tolist() == trained.tolist()
    lookup = open_shop(folder).model.lookup
    users = np.flatnonzero(lookup.train_end - lookup.offsets[:-1] > lookup.max_length)
    want = lookup.train_end[users][:, None] - np.arange(lookup.max_length, 0, -1)
    assert len(users) > 2 and lookup.pack_bank(users).is_source.all()
    np.testing.assert_array_equal(lookup.pack_bank(users).events, want.reshape(-1))
    banks = [open_shop(folder, seed=s, **bank, bank_size=5).model.bank_users for s in (1, 1, 2)]
    assert banks[0].tolist() == banks[1].tolist() != banks[2].tolist() and len(banks[0]) == 5


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
    held_out = made.dataset.part != TRAIN
    items = model.lookup.items
    items[held_out] = 1 + items[held_out] % (model.n_items - 1)
    assert all(torch.equal(a, b) for a, b in zip(results(), want, strict=True))


def test_held_out_events_never_reach_another_user(folder: Path) -> None:
    """Rows of test histories hold validation events; even as sources no one else reads them."""
    made = open_shop(folder, inference_relations="batch")
    model, lookup = shaken(made), made.model.lookup
    target = made.loaders["test"]._dataset.inter_feat.target.numpy()
    start = lookup.offsets[lookup.users[target]]
    rows = lookup.pack_histories(start, target, is_bank=True)  # as if they were there to be read
    seen = influence(model, rows)
    user, held_out = lookup.users[rows.events], ~lookup.is_trained[rows.events]
    assert held_out.sum() > 5
    other = user[:, None] != user
    assert not seen[:, held_out][other[:, held_out]].any()
    assert seen[other].any()
