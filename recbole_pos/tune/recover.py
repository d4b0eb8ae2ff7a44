"""What a killed search left on its storage, made ready to be taken up again."""

from __future__ import annotations

import json
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyarrow import fs
from ray import tune

from recbole_pos.errors import CheckpointError, UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.tune.searchers import NumberedSearcher
from recbole_pos.tune.storage import filesystem


def mend_searcher(path: str, searcher: NumberedSearcher) -> None:
    """Make what Ray kept of the searcher agree with the trials that there are.

    Ray copies three files one after another, each in place. A driver killed in between leaves one
    cut off, or older than the others: trials that have ended take the places of those that run, and
    Ray would wait for the next trial for ever. What was asked and told is known from the trials.

    Args:
        path: folder or URI of Ray's part of the search.
        searcher: a new one, as the search began with.
    """
    trials = sorted(tune.ExperimentAnalysis(path).trials, key=lambda one: one.config["number"])
    live = {trial.trial_id for trial in trials if not trial.is_finished()}
    _mend_generator(path, len(trials), live)
    storage, file = _newest(path, "searcher-state-")
    if file is None:
        return
    state = _read(storage, file, pickle.loads) or {}
    known = set(state.get("numbers", ())) == {one.trial_id for one in trials}
    if known and set(state.get("asked", live)) == live:
        return
    for trial in trials:
        searcher.recall(trial.trial_id, trial.config["options"])
        if trial.is_finished():
            searcher.on_trial_complete(trial.trial_id, trial.last_result, trial.status == "ERROR")
    with tempfile.TemporaryDirectory() as local, storage.open_output_stream(file) as stream:
        searcher.save(f"{local}/state")
        stream.write(Path(f"{local}/state").read_bytes())


def _mend_generator(path: str, trials: int, live: set[str]) -> None:
    """How many trials were made, and which of them take places of ``max_concurrent``."""
    storage, file = _newest(path, "search_gen_state-")
    if file is None:
        return
    state = _read(storage, file, pickle.loads)
    places = {"live_trials": live, "num_unfinished_live_trials": len(live)}
    limiters = {
        name: {**kept, **places}
        for name, kept in state.items()
        if isinstance(kept, dict) and "live_trials" in kept
    }
    mended = {**state, **limiters, "counter": trials}
    if limiters != {name: state[name] for name in limiters} or state["counter"] != trials:
        with storage.open_output_stream(file) as stream:
            stream.write(pickle.dumps(mended))


def require_state(path: str) -> None:
    """Refuse a search whose trials, or how many there are to be, were cut off in writing.

    Raises:
        UsageError: for a file that cannot be read.
    """
    if (file := _cut_off(path)) is not None:
        raise UsageError(
            f"--resume: {file} was cut off when its driver was killed, so the search cannot be "
            "continued. Its trials are in the folders beside that file; start a new search"
        )


def await_state(path: str, seconds: float = 10.0) -> None:
    """After an interrupt, let Ray end what it is writing.

    A thread of Ray's copies the state, in place; the interrupt ends the search, not the thread.
    Read at that moment the state is cut off, and remains so if this process ends first.

    Args:
        path: folder or URI of Ray's part of the search.
        seconds: how long to wait at most.
    """
    until = time.monotonic() + seconds
    while _cut_off(path) is not None and time.monotonic() < until:
        time.sleep(0.05)


def _cut_off(path: str) -> str | None:
    """The first file of the state that cannot be read."""
    for name, read in (("experiment_state-", json.loads), ("search_gen_state-", pickle.loads)):
        storage, file = _newest(path, name)
        if file is not None and _read(storage, file, read) is None:
            return file
    return None


def _newest(path: str, name: str) -> tuple[fs.FileSystem, str | None]:
    """The newest of Ray's files of a kind; their names have the time."""
    storage, folder = filesystem(path)
    paths = [
        one.path for one in storage.get_file_info(fs.FileSelector(folder, allow_not_found=True))
    ]
    return storage, max((p for p in paths if p.rsplit("/", 1)[-1].startswith(name)), default=None)


def _read(storage: fs.FileSystem, path: str, read: Callable[[bytes], Any]) -> Any:
    """What is in a file, read as Ray will; None if it was cut off."""
    with storage.open_input_stream(path) as file:
        content = file.read()
    try:
        return read(content)
    except Exception:  # a file that was cut off raises whatever it stumbles upon
        return None


def mend_checkpoints(path: str) -> None:
    """Put a checkpoint where the saved state of the search says that a trial has one.

    Ray deletes a trial's old checkpoints before it saves the state that names the newer ones. A
    driver killed in between leaves a state that names what is gone, and Ray gives up such a trial.
    The newest checkpoint that is there and whole goes to the place of the one named; the trial
    goes on from it. Without any, the place stays empty and the trial begins again.

    Args:
        path: folder or URI of Ray's part of the search.
    """
    for trial in tune.ExperimentAnalysis(path).trials:
        named = trial.checkpoint
        if named is not None and not _exists(named):
            _replace(named)


def _exists(place: tune.Checkpoint) -> bool:
    storage: Any = place.filesystem
    return storage.get_file_info(place.path).type != fs.FileType.NotFound


def _replace(named: tune.Checkpoint) -> None:
    storage: Any = named.filesystem
    folder = named.path.rsplit("/", 1)[0]
    entries = storage.get_file_info(fs.FileSelector(folder, allow_not_found=True))
    others = [one for one in entries if one.base_name.startswith("checkpoint_")]
    storage.create_dir(named.path)
    for other in sorted(others, key=lambda one: one.base_name, reverse=True):  # padded with zeros
        if _is_whole(tune.Checkpoint(other.path, storage)):
            fs.copy_files(
                other.path, named.path, source_filesystem=storage, destination_filesystem=storage
            )
            return


def _is_whole(place: tune.Checkpoint) -> bool:
    """False for a copy that its process did not live to end."""
    try:
        with place.as_directory() as folder:
            checkpoint.load(RunFolder(folder).checkpoint)
    except (CheckpointError, OSError):
        return False
    return True
