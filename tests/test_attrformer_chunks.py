"""Chunks of AttrFormer's long histories: which there are, and how they are linked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from shop import open_shop, shaken, tables, write

from recbole_pos.data.splits import TRAIN
from recbole_pos.data.windows import TARGET_EVENT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("shop"), tables())


@pytest.mark.parametrize("length", [1, 2, 5, 40])
def test_chunks_lose_and_repeat_no_event(folder: Path, length: int) -> None:
    """All windows of a user come in one batch, in order; in prediction the whole history."""
    made = open_shop(folder, MAX_ITEM_LIST_LENGTH=length, train_batch_size=3)
    log, part, lookup = made.dataset.log, made.dataset.part, made.model.lookup
    loader = made.trainer.training_loader(made.loaders["train"])
    seen, owner = [], {}
    for number, batch in enumerate(loader):
        events = batch.events.tolist()
        seen += events
        for event in events:
            assert owner.setdefault(int(log.users[event]), number) == number
        rows = lookup.windows(
            batch.events.numpy(), batch.lengths.numpy(), np.ones(len(events), bool), True
        )
        users = log.users[batch.events].numpy()
        assert len(np.unique(rows.chain)) == len(np.unique(users))
        assert (np.diff(batch.events.numpy())[users[1:] == users[:-1]] == 1).all()
        assert batch.lengths.max() <= length
    users = log.users.numpy()[part == TRAIN]
    last = np.append(np.flatnonzero(np.diff(users)), len(users) - 1)
    inputs = np.delete(np.flatnonzero(part == TRAIN), last)  # the newest is a target alone
    assert sorted(seen) == inputs.tolist()
    assert len(loader) > 1
    target = made.loaders["test"]._dataset.inter_feat.target.numpy()
    start = log.offsets[log.users.numpy()[target]]
    rows = lookup.histories(start, target, bank=False)
    first = np.cumsum(rows.lengths) - rows.lengths
    for chain, (begin, end) in enumerate(zip(start, target, strict=True)):
        own = np.flatnonzero(rows.chain == chain)
        events = rows.events[first[own[0]] : first[own[-1]] + rows.lengths[own[-1]]]
        assert events.tolist() == list(range(begin, end))
        assert (rows.lengths[own][1:] == length).all() and rows.lengths[own].max() <= length


def test_only_chunks_that_follow_each_other_are_linked(folder: Path) -> None:
    """Neither the first events of the next user, nor chunks with a gap between them."""
    lookup = open_shop(folder).model.lookup
    user = np.flatnonzero(np.diff(lookup.offsets) >= 6)[0]
    start, end = lookup.offsets[user : user + 2]

    def chains(*spans: tuple[int, int]) -> list[int]:
        events = np.concatenate([np.arange(*span) for span in spans])
        lengths = np.array([high - low for low, high in spans])
        return lookup.windows(events, lengths, events >= 0, linked=True).chain.tolist()

    assert chains((start, start + 2), (start + 2, start + 5)) == [0, 0]
    assert chains((start, start + 2), (start + 3, start + 5)) == [0, 1]
    assert chains((start, end), (end, end + 1)) == [0, 1]


def test_relations_reach_from_chunk_to_chunk(folder: Path, double) -> None:
    """The first event of a chunk reads the chunks before it, unless they are not linked."""
    changed = {}
    for chunking in (True, False):
        made = open_shop(folder, MAX_ITEM_LIST_LENGTH=3, cross_sequence="none", chunking=chunking)
        model, lookup = shaken(made), made.model.lookup
        target = made.loaders["test"]._dataset.inter_feat.target
        users = lookup.users[target.numpy()]
        long = np.flatnonzero(target.numpy() - lookup.offsets[users] >= 6)
        rows = made.loaders["test"]._dataset[long]
        with torch.inference_mode():
            want = model.states_of(rows)
            for n in range(len(rows)):  # everything older than the newest window
                event = int(rows[TARGET_EVENT][n])
                old = slice(int(lookup.offsets[lookup.users[event]]), event - 3)
                lookup.items[old] = 1 + lookup.items[old] % (model.n_items - 1)
            got = model.states_of(rows)
        changed[chunking] = int((got != want).any(1).sum())
        assert len(rows) > 3
    assert changed[False] == 0 < changed[True]
