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
class Loaded:
    """A model in memory.

    Attributes:
        run_dir: where it is from.
        trained: when its weights were written, and ``loaded`` when they were read: UTC.
        unfinished: of an unfinished run, how to finish it.
    """

    recommender: Recommender
    run_dir: str
    trained: str
    loaded: str
    unfinished: str = ""

    def described(self) -> dict[str, Any]:
        """What /health says of it."""
        dataset, growth = self.recommender.dataset, self.recommender.growth
        return {
            "model": self.recommender.config["model"],
            "run_dir": self.run_dir,
            "trained": self.trained,
            "loaded": self.loaded,
            "items": len(self.recommender.items),
            "users": dataset.user_num - 1,
            "events": self.recommender.events,
            "unknown_items": growth.items,
            **({"unfinished": self.unfinished} if self.unfinished else {}),
        }


class Live:
    """Holds one loaded model; another is loaded beside it, then takes its place at once.

    Who has taken ``now`` keeps it to the end of a request, whatever comes after.
    """

    def __init__(self, run_dir: str | Path, data_path: str | None = None) -> None:
        self.run_dir, self.data_path = str(run_dir), data_path
        self.now: Loaded | None = None
        self._loading = threading.Lock()

    def load(self, run_dir: str | None = None) -> Loaded:
        """Read a model, ask it something, and put it in place; the one before answers until then.

        Args:
            run_dir: its folder; as before if None.

        Raises:
            Refusal: while another is being loaded.
            PosError: where there is none that works; the one before stays.
        """
        if not self._loading.acquire(blocking=False):
            raise Refusal(409, "a model is being loaded already; ask again when it is there")
        try:
            self.now = _load(self.run_dir if run_dir is None else run_dir, self.data_path)
            self.run_dir = self.now.run_dir
            gc.collect()  # a model and its trainer know each other, so nothing else frees them
            give_back()
            return self.now
        finally:
            self._loading.release()


def _load(run_dir: str, data_path: str | None) -> Loaded:
    try:
        folder = RunFolder(run_dir).require()
        written = folder.checkpoint.stat().st_mtime
        recommender = Recommender.load(run_dir, data_path)
    except PosError:
        raise
    except (OSError, ValueError) as error:  # a name too long, say, or no permission to read
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"run_dir: {shown(run_dir)} cannot be read: {why}") from error
    try:
        _try(recommender)
    except PosError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{run_dir}: the model cannot be asked: {type(error).__name__}: {error}"
        ) from error
    hint = folder.how_to_finish if unfinished(folder) else ""
    return Loaded(recommender, run_dir, _utc(written), _utc(time.time()), hint)


def _try(recommender: Recommender) -> None:
    """Recommend once, which also makes what is made at first use."""
    if recommender.by_user:
        users = np.flatnonzero(recommender.dataset.log.lengths)[:1]
        names = recommender.dataset.field2id_token[recommender.dataset.uid_field][users]
        asked = recommender.of_users(names.tolist())
    else:
        asked = recommender.read([{"items": [recommender.items[0]], "times": [0.0]}])
    list(recommender.ranked(asked, 1, False, recommender.choice()))


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")
