"""The models that answer requests; one is replaced without a pause."""

from __future__ import annotations

import gc
import hashlib
import re
import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recbole_pos.config.arguments import ServeArguments
from recbole_pos.errors import CheckpointError, PosError, UsageError
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.memory import trim_heap
from recbole_pos.experiment.result import is_unfinished
from recbole_pos.serve.bodies import Refusal
from recbole_pos.serve.recommender import Recommender
from recbole_pos.values import shown

ALONE = "default"  # the name of a model that has none


class LoadedModel(NamedTuple):
    """A model in memory, the folder of its run, and the facts that /health answers."""

    recommender: Recommender
    run_dir: str
    facts: dict[str, Any]


class ModelHolder:
    """Holds the ``current`` model of a name; the next is loaded beside it, then replaces it.

    A request keeps the model that it began with. ``current`` is None before the first is loaded.
    """

    def __init__(self, run_dir: str | Path, settings: ServeArguments) -> None:
        self.run_dir, self.settings = str(run_dir), settings
        self.current: LoadedModel | None = None
        self._loading = threading.Lock()

    def load(self, run_dir: str | None = None) -> LoadedModel:
        """Load the model of a run, by default of the same one, and swap it in.

        Raises:
            Refusal: while another model is being loaded.
            PosError: if the folder has no model that works; the previous model stays.
        """
        if not self._loading.acquire(blocking=False):
            raise Refusal(409, "a model is being loaded already; ask again when it is there")
        try:
            self.current = self._load(self.run_dir if run_dir is None else run_dir)
            self.run_dir = self.current.run_dir
            gc.collect()  # nothing else frees a model and its trainer, which refer to each other
            trim_heap()
            return self.current
        finally:
            self._loading.release()

    def _load(self, run_dir: str) -> LoadedModel:
        """Return the model of a run, which has recommended once, so that no broken one serves."""
        settings = self.settings
        try:
            folder = RunFolder(run_dir).require()
            saved_at = folder.checkpoint.stat().st_mtime
            trained = Recommender.load(
                run_dir,
                data_path=settings.data_path,
                histories_only=settings.histories_only or None,
                item_vectors=settings.item_vectors,
            )
        except PosError:
            raise
        except (OSError, ValueError) as error:  # such as a name too long, or no permission
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"run_dir: {shown(run_dir)} cannot be read: {reason}") from error
        try:
            _recommend_once(trained)
        except PosError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{run_dir}: the model cannot be asked: {type(error).__name__}: {error}"
            ) from error
        facts = {
            "model": trained.config["model"],
            "run_dir": run_dir,
            "trained": _format_utc(saved_at),
            "loaded": _format_utc(time.time()),
            "items": len(trained.items),
            "users": trained.dataset.user_num - 1,
            "events": trained.collect_facts()["interactions"],
            "unknown_items": trained.growth.items,
        }
        if is_unfinished(folder):
            facts["unfinished"] = folder.how_to_finish
        return LoadedModel(trained, run_dir, facts)


def _recommend_once(trained: Recommender) -> None:
    """Rank the items for one user or history, which also fills the caches of the model."""
    if trained.by_user:
        users = np.flatnonzero(trained.dataset.log.lengths)[:1]
        names = trained.dataset.field2id_token[trained.dataset.uid_field][users]
        packed = trained.read_users(names.tolist())
    else:
        packed = trained.read([{"items": [trained.items[0]], "times": [0.0]}])
    trained.rank_items(packed, 1, False, trained.choose_items())


def _format_utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


class ModelHolders:
    """The models of a server by name, and the share of ids that each answers.

    Args:
        folders: folders of runs by name of the model; a single model is named ``ALONE``.
        settings: how models are loaded, and ``shares``: ``NAME=PART`` for each model; if empty, the
            first model answers all.

    Raises:
        UsageError: for shares of unknown models, or shares that do not add up to 1.
    """

    def __init__(self, folders: Mapping[str, str | Path], settings: ServeArguments) -> None:
        """Make a holder for each model, none of them loaded, and read the shares of ids."""
        self.by_name = {name: ModelHolder(path, settings) for name, path in folders.items()}
        self.first = next(iter(self.by_name))
        shares = settings.shares
        triples = [text.partition("=") for text in shares] or [(self.first, "=", "1")]
        self._shared_names = [name for name, _, _ in triples]
        for name in self._shared_names:
            self.require(name, "--shares")
        try:
            fractions = np.array([float(fraction) for _, _, fraction in triples])
        except ValueError:
            fractions = np.array([np.nan])
        if not (np.isclose(fractions.sum(), 1) and (fractions >= 0).all()):
            raise UsageError(
                "--shares: expected NAME=PART such as B=0.1, parts that are 1 together, found "
                f"{' '.join(shares)}"
            )
        self._upper_bounds = np.cumsum(fractions) / fractions.sum()

    def require(self, name: str, field: str = "model") -> ModelHolder:
        """Return the holder of a model by its name; raise a UsageError for another name."""
        if name not in self.by_name:
            known = ", ".join(self.by_name)
            raise UsageError(f"{field}: {shown(name)} is not served; expected one of {known}")
        return self.by_name[name]

    def choose(self, key: Hashable) -> str:
        """Return the name of the model for an id, the first model for None.

        An id is hashed to [0, 1), so all servers choose alike at all times. If shares change, only
        ids between an old bound and the new one get another model.
        """
        if key is None:
            return self.first
        digest = hashlib.blake2b(str(key).encode(), digest_size=8).digest()
        position = int.from_bytes(digest, "big") / 2**64
        index = int(np.searchsorted(self._upper_bounds, position, "right"))
        return self._shared_names[min(index, len(self._shared_names) - 1)]


def parse_models(arguments: Sequence[str]) -> dict[str, str]:
    """Return folders of runs by model name, from ``RUN_DIR`` or ``NAME=RUN_DIR ...``.

    Raises:
        UsageError: if one of several has no name, or two have the same.
    """
    matches = [re.fullmatch(r"(\w[\w.-]*)=(.+)", text) for text in arguments]
    if len(arguments) == 1 and not matches[0]:
        return {ALONE: arguments[0]}
    folders = {match[1]: match[2] for match in matches if match}
    if not arguments or len(folders) < len(arguments):
        raise UsageError(
            "RUN_DIR: expected the folder of a run, or several as NAME=RUN_DIR with different "
            f"names; found {' '.join(arguments) or 'none'}"
        )
    return folders
