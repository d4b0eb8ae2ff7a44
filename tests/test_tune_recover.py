"""What a killed driver leaves of the state of a search, cut off where Ray wrote."""

from __future__ import annotations

import json
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import PATIENCE

from recbole_pos.errors import UsageError
from recbole_pos.tune import recover
from recbole_pos.tune.recover import await_state, mend_searcher, require_state
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


@pytest.mark.parametrize("file", ["experiment_state-1.json", "search_gen_state-1.json"])
def test_an_interrupt_waits_for_what_ray_is_writing(tmp_path: Path, file: str) -> None:
    """A search was interrupted while Ray copied its state: no trials.csv was written."""
    state = {"trial_data": []}
    whole = json.dumps(state).encode() if "experiment" in file else pickle.dumps(state)
    (tmp_path / file).write_bytes(whole[:5])
    copying = threading.Timer(0.3, (tmp_path / file).write_bytes, [whole])
    copying.start()
    await_state(str(tmp_path), seconds=PATIENCE)
    assert (tmp_path / file).read_bytes() == whole
    require_state(str(tmp_path))


def test_an_interrupt_does_not_wait_for_ever(tmp_path: Path) -> None:
    await_state(str(tmp_path / "not there"))
    (tmp_path / "experiment_state-1.json").write_text("{")
    await_state(str(tmp_path), seconds=0.1)


@pytest.mark.parametrize("name", list(SEARCHERS))
def test_a_state_older_than_the_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of two places both were taken by trials that had ended: Ray waited for ever."""
    space = GRID if name == "grid" else SPACE
    searcher = SEARCHERS[name](space, "max", 3)
    trials = []
    for number in range(3):
        config = searcher.suggest(f"t{number}")
        ended = {"is_finished": lambda ended=number < 2: ended, "last_result": {BEST: 0.5}}
        trials.append(
            SimpleNamespace(trial_id=f"t{number}", config=config, status="TERMINATED", **ended)
        )
    searcher.save(str(tmp_path / "searcher-state-1.pkl"))  # of before any of them ended
    limiter = {"max_concurrent": 2, "live_trials": {"t0", "t1"}, "num_unfinished_live_trials": 2}
    state = {"counter": 2, "total_samples": 6, "name:ConcurrencyLimiter": limiter}
    (tmp_path / "search_gen_state-1.json").write_bytes(pickle.dumps(state))
    analysis = SimpleNamespace(trials=trials)
    monkeypatch.setattr(recover.tune, "ExperimentAnalysis", lambda path: analysis)
    for _ in range(2):  # what is mended stays as it is
        mend_searcher(str(tmp_path), SEARCHERS[name](space, "max", 3))
        mended = pickle.loads((tmp_path / "search_gen_state-1.json").read_bytes())
        assert mended["name:ConcurrencyLimiter"]["live_trials"] == {"t2"}
        assert mended["name:ConcurrencyLimiter"]["num_unfinished_live_trials"] == 1
        assert mended["counter"] == 3 and mended["total_samples"] == 6
        again = SEARCHERS[name](space, "max", 3)
        again.restore(str(tmp_path / "searcher-state-1.pkl"))
        assert set(again.numbers) == {"t0", "t1", "t2"}
        if name == "optuna":
            assert set(again.asked) == {"t2"}
