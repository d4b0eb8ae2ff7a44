"""The model that answers, and its replacement while it does."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from recbole_pos.errors import CheckpointError, PosError, UsageError
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.memory import give_back
from recbole_pos.experiment.result import unfinished
from recbole_pos.serve.bodies import Refusal
from recbole_pos.serve.recommender import Recommender
from recbole_pos.values import shown


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory.

    Attributes:
        recommender: the model.
        run_dir: its folder.
        about: what /health says about it.
    """

    recommender: Recommender
    run_dir: str
    about: dict[str, Any]


class ModelHolder:
    """Hold one model; another is loaded beside it, then takes its place at once.

    A request that has taken ``now`` keeps it to its end, whatever comes after.
    """

    def __init__(
        self, run_dir: str | Path, data_path: str | None = None, item_vectors: str | None = None
    ) -> None:
        self.run_dir, self.data_path, self.item_vectors = str(run_dir), data_path, item_vectors
        self.now: LoadedModel | None = None
        self._loading = threading.Lock()

    def load(self, run_dir: str | None = None) -> LoadedModel:
        """Read a model, ask it something, and put it in place; the one before answers until then.

        Args:
            run_dir: its folder; as before if None.

        Raises:
            Refusal: while another is being loaded.
            PosError: where none exists that works; the one before stays.
        """
        if not self._loading.acquire(blocking=False):
            raise Refusal(409, "a model is being loaded already; ask again when it is there")
        try:
            folder = self.run_dir if run_dir is None else run_dir
            self.now = _load(folder, self.data_path, self.item_vectors)
            self.run_dir = self.now.run_dir
            gc.collect()  # a model and its trainer know each other, so nothing else frees them
            give_back()
            return self.now
        finally:
            self._loading.release()


def _load(run_dir: str, data_path: str | None, item_vectors: str | None) -> LoadedModel:
    try:
        folder = RunFolder(run_dir).require()
        written = folder.checkpoint.stat().st_mtime
        trained = Recommender.load(run_dir, data_path, item_vectors=item_vectors)
    except (OSError, ValueError) as error:  # a name too long, say, or no permission to read
        if isinstance(error, PosError):
            raise
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"run_dir: {shown(run_dir)} cannot be read: {why}") from error
    try:
        _try(trained)
    except Exception as error:
        if isinstance(error, PosError):
            raise
        raise CheckpointError(
            f"{run_dir}: the model cannot be asked: {type(error).__name__}: {error}"
        ) from error
    about = {
        "model": trained.config["model"],
        "run_dir": run_dir,
        "trained": _utc(written),
        "loaded": _utc(time.time()),
        "items": len(trained.items),
        "users": trained.dataset.user_num - 1,
        "events": trained.events,
        "unknown_items": trained.growth.items,
    }
    if unfinished(folder):
        about["unfinished"] = folder.how_to_finish
    return LoadedModel(trained, run_dir, about)


def _try(trained: Recommender) -> None:
    """Recommend once, which also makes what is made at first use."""
    if trained.by_user:
        users = np.flatnonzero(trained.dataset.log.lengths)[:1]
        names = trained.dataset.field2id_token[trained.dataset.uid_field][users]
        asked = trained.of_users(names.tolist())
    else:
        asked = trained.read([{"items": [trained.items[0]], "times": [0.0]}])
    list(trained.ranked(asked, 1, False, trained.choice()))


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")
