"""Sizes in a search: what does not fit together is found before the first trial."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_tune_space import settings, write

from recbole_pos.errors import UsageError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hidden_size: {choice: [64, 48]}\nn_heads: {choice: [1, 3, 4]}", "64 is not .* n_heads 3"),
        ("n_heads: {randint: [1, 4]}", "64 is not a multiple of n_heads 3"),
        ("hidden_size: {quniform: [62, 66, 2]}\nn_heads: {choice: [2, 31]}", "n_heads 31"),
        ("hidden_size: {uniform: [8, 64]}", "hidden_size: expected a whole number"),
        ("n_heads: {choice: [2, 1025]}", "n_heads must be at most 1,024"),
        ("layer_norm_eps: {loguniform: [1.0e-320, 1]}", "1e-320 is too small"),
    ],
)
def test_sizes_that_do_not_fit_are_found_before_the_first_trial(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(UsageError, match=f"space.yaml, line [12]: .*{message}"):
        settings(write(tmp_path, text))


@pytest.mark.parametrize(
    "text",
    [
        "n_heads: {choice: [1, 2]}\nhidden_size: {choice: [48, 64]}",
        "n_heads: {choice: [1, 8]}\nhidden_size: {choice: [60, 65], when: {n_heads: 1}}",
    ],
)
def test_sizes_that_fit_where_they_come_together_are_searched(tmp_path: Path, text: str) -> None:
    assert settings(write(tmp_path, text)).space.names == ["n_heads", "hidden_size"]


def test_heads_of_full_size_need_not_divide(tmp_path: Path) -> None:
    text = "n_heads: {choice: [3, 4]}\nhidden_size: {choice: [10, 64]}"
    assert settings(write(tmp_path, text), "FGNN").space.names == ["n_heads", "hidden_size"]
