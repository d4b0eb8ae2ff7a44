"""What a killed search left on its storage, made ready to be taken up again."""

from __future__ import annotations

from pyarrow import fs
from ray import tune

from recbole_pos import checkpoint
from recbole_pos.errors import CheckpointError
from recbole_pos.report import RunFolder


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
    return place.filesystem.get_file_info(place.path).type != fs.FileType.NotFound


def _replace(named: tune.Checkpoint) -> None:
    storage, folder = named.filesystem, named.path.rsplit("/", 1)[0]
    found = storage.get_file_info(fs.FileSelector(folder, allow_not_found=True))
    others = [one for one in found if one.base_name.startswith("checkpoint_")]
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
