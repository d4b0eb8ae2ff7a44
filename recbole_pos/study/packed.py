"""Kept runs of a study: all that its tables need, so that no one has to train it again.

They are a folder of three files: ``facts.json`` has for each run its options of the search, metrics
and cost, ``epochs.parquet`` its validation by epoch, and ``ranks.parquet`` in a column the ranks of
its test targets, in the order of the dataset. There are no weights and no data: users, items and
times are read from the dataset again. So the folder may be shared where the data may not, and
serves only those who have the same data: the name of a run is a digest of options, data and split.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.splits import TEST
from recbole_pos.errors import UsageError
from recbole_pos.experiment.evaluation import make_rank_table
from recbole_pos.experiment.folder import make_folder
from recbole_pos.files import atomic_write, write_json
from recbole_pos.runs import DONE
from recbole_pos.study.plan import Plan
from recbole_pos.study.study_folder import KNOWN_FROM, StudyFolder, read_epochs, read_json

_FACTS, _EPOCHS, _RANKS = "facts.json", "epochs.parquet", "ranks.parquet"
# Facts of a run that others may read: no paths, no names of machines, no times of the split.
_PUBLIC_FACTS = (
    *("row", "seed", "stage", "trial", "commit", "model", "searched"),
    *("digest", "dataset"),
    *("best_valid", "test", "epochs", "best_epoch", "seconds", "targets_per_second", "parameters"),
    *("candidates", "valid_targets", "test_targets", "peak_rss_mb", "versions", "device"),
)


class PackedStudy:
    """The kept runs in a folder that :func:`pack` wrote; a UsageError refuses another folder.

    Attributes:
        fits: digest of a run -> its facts, as :meth:`StudyFolder.read_fit` returns them.
        epochs: a line for each epoch: digest, epoch, and a column for each validation metric.
        used: digests of its runs that belong to the present study, which a scheduler adds.
    """

    def __init__(self, path: str | Path) -> None:
        """Read the facts and the epochs of the runs."""
        self.path = Path(path)
        if not (self.path / _FACTS).is_file():
            raise UsageError(f"--known: {path} is not a folder of `compare --pack`: no {_FACTS}")
        known_from = {"status": DONE, KNOWN_FROM: self.path.name}
        facts = read_json(self.path / _FACTS)
        self.fits = {digest: {**run, **known_from} for digest, run in facts.items()}
        self.epochs = pd.read_parquet(self.path / _EPOCHS)
        self.used: set[str] = set()

    def _read_ranks(self, digest: str, config: PosConfig, dataset: Any) -> pd.DataFrame:
        """Return the table of ranks that the folder of a tested run has."""
        ranks = pd.read_parquet(self.path / _RANKS, columns=[digest])[digest].dropna()
        targets = np.flatnonzero(dataset.split.find_targets(TEST))
        return make_rank_table(dataset, targets, ranks.to_numpy(np.int64), config["timestamp_unit"])

    def restore(self, digest: str, folder: StudyFolder, config: PosConfig, dataset: Any) -> None:
        """Write a run into a study's folder, as if it had been trained there, but without weights.

        Args:
            digest: digest of a kept run.
            folder: folder of the study.
            config: configuration of the run, with paths of this machine.
            dataset: dataset of the configuration.
        """
        run = folder.run(digest)
        make_folder(run.path)
        run.write_config(config.plain)
        lines = self.epochs[self.epochs["digest"] == digest].drop(columns="digest")
        epochs = [line.dropna().to_dict() for _, line in lines.iterrows()]
        run.write_metrics({"epoch": int(valid.pop("epoch")), "valid": valid} for valid in epochs)
        if self.fits[digest].get("test") is not None:  # trials of a search are not tested
            run.write_ranks(self._read_ranks(digest, config, dataset))
        folder.write_fit(digest, self.fits[digest])  # last: it marks the run as done

    def __str__(self) -> str:
        """Return a sentence on how many of the runs belong to the present study."""
        summary = f"{self.path}: {len(self.used)} of its {len(self.fits)} runs are of this study"
        if len(self.used) < len(self.fits):
            summary += "; the others are of other configurations, data or seeds"
        return summary


def pack(plan: Plan, folder: StudyFolder, path: str | Path) -> int:
    """Write the finished runs of a study into a folder to keep, and return their number.

    Raises:
        UsageError: if no run is finished.
    """
    facts: dict[str, Any] = {}
    epochs: list[dict[str, Any]] = []
    ranks: dict[str, np.ndarray] = {}
    for digest in sorted(set(folder.find_current_digests(plan).values())):
        fit, run = folder.read_fit(digest), folder.run(digest)
        if fit.get("status") != DONE:
            continue
        facts[digest] = {key: fit[key] for key in _PUBLIC_FACTS if key in fit}
        for epoch in read_epochs(run):
            epochs.append({"digest": digest, "epoch": epoch["epoch"], **(epoch["valid"] or {})})
        if run.ranks.is_file():
            ranks[digest] = pd.read_parquet(run.ranks, columns=["rank"])["rank"].to_numpy()
    if not facts:
        raise UsageError(f"--pack {path}: {folder.path} has no finished run")
    kept = Path(path)
    make_folder(kept)
    write_table(pd.DataFrame(epochs or {"digest": []}), kept / _EPOCHS)
    # runs of different splits have columns of different lengths, which pandas fills up
    columns = {digest: pd.Series(rank, dtype="Int32") for digest, rank in ranks.items()}
    write_table(pd.DataFrame(columns), kept / _RANKS)
    write_json(kept / _FACTS, facts)
    return len(facts)


def write_table(frame: pd.DataFrame, path: Path) -> None:
    """Write a table as parquet, small; ranks hardly repeat, so their bytes are compressed apart."""
    is_ranks = path.name == _RANKS
    with atomic_write(path, text=False) as file:
        pq.write_table(
            pa.Table.from_pandas(frame, preserve_index=False),
            file,
            compression="zstd",
            compression_level=19,
            use_dictionary=not is_ranks,
            use_byte_stream_split=is_ranks,
        )
