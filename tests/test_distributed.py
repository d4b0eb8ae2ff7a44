"""What processes of a group share: gradients, buffers, the states that a loss compares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from group_worker import everything, in_group


def test_what_two_processes_share(tmp_path: Path) -> None:
    found = in_group(2, everything, tmp_path)
    assert len(found) == 2
    gradients_are_sums_over_all_processes([one["gradients"] for one in found])
    a_sampled_loss_is_that_of_the_whole_batch([one["sampled"] for one in found])


def gradients_are_sums_over_all_processes(found: list[dict[str, Any]]) -> None:
    """Parameters may be frozen, sparse, never used, or used in some processes of some steps."""
    for step in range(3):
        own = [one["own"][step] for one in found]
        for name in own[0]:
            parts = [part[name] for part in own if part[name] is not None]
            for one in found:
                shared = one["shared"][step][name]
                if parts:
                    torch.testing.assert_close(shared, sum(parts), msg=f"{name}, step {step}")
                else:
                    assert shared is None or not shared.any(), (name, step)
        assert any(part["sometimes.weight"] is None for part in own) is (step > 0)
    for name, buffer in found[0]["before"].items():
        assert all(torch.equal(one["buffers"][name], buffer) for one in found)
    means = [one["before"]["norm.running_mean"] for one in found]
    assert not torch.equal(*means)  # each would have gone its own way


def a_sampled_loss_is_that_of_the_whole_batch(found: list[dict[str, Any]]) -> None:
    """Its buckets take positions of all processes; a process may have a row that is only lent."""
    for name in found[0]:
        value = sum(one[name]["value"] for one in found)
        torch.testing.assert_close(value, found[0][name]["expected value"])
        for one in found:
            torch.testing.assert_close(one[name]["gradients"], found[0][name]["expected"])
