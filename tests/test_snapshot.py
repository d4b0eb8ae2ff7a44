"""Copies of a state: of one moment, in memory that is used again."""

from __future__ import annotations

import torch

from recbole_pos.experiment.snapshot import Snapshots


def test_a_copy_is_of_one_moment_and_reuses_its_memory() -> None:
    snapshots, base = Snapshots(), torch.arange(12.0)
    own = torch.ones(3)
    state = {
        "a": base.view(3, 4),
        "turned": base.view(3, 4).mT,
        "spread": base[:1].expand(5),
        "whole": torch.arange(3),
        "own": own,
        "more": [{"x": (1, base[2:4])}],
    }
    copied = snapshots.take(state, own)
    place = copied["a"].data_ptr()
    assert copied["own"] is not own and copied["own"].data_ptr() == own.data_ptr()
    assert place == copied["turned"].data_ptr() != base.data_ptr()
    for name in ("a", "turned", "spread"):
        assert torch.equal(copied[name], state[name])
        assert copied[name].stride() == state[name].stride()
    base += 1
    assert copied["a"][0, 1] == 1 and copied["more"][0]["x"][1].tolist() == [2, 3]
    assert snapshots.take(state, own)["a"].data_ptr() == place
