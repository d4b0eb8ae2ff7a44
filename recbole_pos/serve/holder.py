"""The model that answers, and its replacement while it does."""

from __future__ import annotations

import gc
import hashlib
import re
import threading
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
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

ALONE = "default"  # the name of a model that has none
_NAMED = re.compile(r"(\w[\w.-]*)=(.+)")  # NAME=RUN_DIR


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


class ModelHolders:
    """The models of a server by name, and which of them answers whom.

    Args:
        folders: of the runs, by name; one without a name is ``ALONE``.
        shares: of the ids that a model answers, by name; all are the first model's if empty.
        data_path, item_vectors: see :class:`ModelHolder`.

    Raises:
        UsageError: for shares that are not of these models, or not 1 together.
    """

    def __init__(
        self,
        folders: Mapping[str, str | Path],
        shares: Mapping[str, float],
        data_path: str | None = None,
        item_vectors: str | None = None,
    ) -> None:
        self.by_name = {
            name: ModelHolder(path, data_path, item_vectors) for name, path in folders.items()
        }
        self.first = next(iter(self.by_name))
        given = shares or {self.first: 1.0}
        for name in given:
            self.require(name, "--shares")
        total = sum(given.values())
        if not np.isclose(total, 1) or min(given.values()) < 0:
            found = ", ".join(f"{name}={share:g}" for name, share in given.items())
            raise UsageError(f"--shares: expected parts that are 1 together, found {found}")
        self._names = list(given)
        self._bounds = np.cumsum(list(given.values())) / total

    def require(self, name: str, field: str = "model") -> ModelHolder:
        """Return the model of a name.

        Raises:
            UsageError: if nothing is there.
        """
        if name not in self.by_name:
            known = ", ".join(self.by_name)
            raise UsageError(f"{field}: {shown(name)} is not served; expected one of {known}")
        return self.by_name[name]

    def choose(self, key: Hashable) -> str:
        """Return the name of the model for an id: the same at all times and on all servers.

        An id is placed in [0, 1) by its hash, so that shares can change and only those between the
        old bound and the new one get another model. What has no id (None) is the first model's.
        """
        if key is None:
            return self.first
        digest = hashlib.blake2b(str(key).encode("utf-8", "surrogatepass"), digest_size=8).digest()
        place = int.from_bytes(digest, "big") / 2**64
        last = len(self._names) - 1
        return self._names[min(int(np.searchsorted(self._bounds, place, "right")), last)]


def parse_models(given: Sequence[str]) -> dict[str, str]:
    """Return the folders of ``RUN_DIR`` or ``NAME=RUN_DIR ...`` by name.

    Raises:
        UsageError: for several of which one has no name, or two the same.
    """
    pairs = [_NAMED.fullmatch(text) for text in given]
    if len(given) == 1 and not pairs[0]:
        return {ALONE: given[0]}
    names = [pair[1] for pair in pairs if pair]
    if not given or len(set(names)) < len(given):
        raise UsageError(
            "RUN_DIR: expected the folder of a run, or several as NAME=RUN_DIR with different "
            f"names; found {' '.join(given) or 'none'}"
        )
    return {pair[1]: pair[2] for pair in pairs if pair}


def parse_shares(given: Iterable[str]) -> dict[str, float]:
    """Return ``NAME=PART ...`` as a dict.

    Raises:
        UsageError: for anything else.
    """
    shares: dict[str, float] = {}
    for text in given:
        name, _, part = text.partition("=")
        try:
            shares[name] = float(part)
        except ValueError:
            raise UsageError(f"--shares: expected NAME=PART such as B=0.1, found {text}") from None
    return shares


def _load(run_dir: str, data_path: str | None, item_vectors: str | None) -> LoadedModel:
    try:
        folder = RunFolder(run_dir).require()
        written = folder.checkpoint.stat().st_mtime
        trained = Recommender.load(run_dir, data_path, item_vectors=item_vectors)
    except (OSError, ValueError) as error:  # such as a name too long, or no permission to read
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
