"""What a killed driver leaves of the state of a search, cut off where Ray wrote."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from recbole_pos.errors import UsageError
from recbole_pos.tune.recover import require_state
from recbole_pos.tune.searchers import BEST, SEARCHERS
from recbole_pos.tune.space import Parameter, Space

SPACE = Space(
    [
        Parameter("n_layers", "choice", [1, 2, 3], "here"),
        Parameter("dropout", "quniform", [0.0, 0.5, 0.1], "here"),
        Parameter("window", "randint", [3, 9], "here", {"n_layers": [2]}),
        Parameter("learning_rate", "loguniform", [1e-4, 1e-1], "here"),
    ]
)
GRID = Space([p for p in SPACE.parameters if p.kind != "loguniform"])


@pytest.mark.parametrize("name", list(SEARCHERS))
def test_a_searcher_recalls_what_it_asked(name: str) -> None:
    """A new one stands as the old one did: the same trials, told the same; new ones differ."""
    space = GRID if name == "grid" else SPACE
    old, new = (SEARCHERS[name](space, "max", 3) for _ in range(2))
    asked = [old.suggest(f"t{n}")["options"] for n in range(8)]
    told = {n: {BEST: n / 10} for n in (0, 2, 3)}
    for n, options in enumerate(asked):
        new.recall(f"t{n}", options)
    for searcher in (old, new):
        for n, result in told.items():
            searcher.on_trial_complete(f"t{n}", result)
        searcher.on_trial_complete("t1", None, error=True)
    assert new.numbers == old.numbers == {f"t{n}": n for n in range(8)}
    if name == "optuna":
        trials = [
            [(t.number, t.state, t.params, t.value) for t in searcher.study.trials]
            for searcher in (old, new)
        ]
        assert trials[0] == trials[1] and set(old.asked) == set(new.asked)
        assert new.suggest("t8")["number"] == 8
    else:
        assert new.suggest("t8") == old.suggest("t8")


@pytest.mark.parametrize("cut", ["experiment_state-1.json", "search_gen_state-1.json"])
def test_a_state_that_was_cut_off_is_told(tmp_path: Path, cut: str) -> None:
    """Ray would wait for ever, or fail without a word of what to do."""
    (tmp_path / "experiment_state-1.json").write_text(json.dumps({"trial_data": []}))
    (tmp_path / "search_gen_state-1.json").write_bytes(pickle.dumps({"counter": 3}))
    require_state(str(tmp_path))
    whole = (tmp_path / cut).read_bytes()
    for size in (0, len(whole) // 2):
        (tmp_path / cut).write_bytes(whole[:size])
        with pytest.raises(UsageError, match=f"{cut} was cut off .* start a new search"):
            require_state(str(tmp_path))
