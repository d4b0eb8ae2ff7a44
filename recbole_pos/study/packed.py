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
from recbole_pos.study.ranks import require_metrics
from recbole_pos.study.study_folder import (
    KNOWN_FROM,
    Layout,
    RunFacts,
    StudyFolder,
    parse,
    parse_epochs,
    read_bounded,
)
from recbole_pos.values import short

_FACTS, _EPOCHS, _RANKS = "facts.json", "epochs.parquet", "ranks.parquet"
# Facts of a run that others may read: no paths, no names of machines, no times of the split.
_PUBLIC_FACTS = (
    *("row", "seed", "stage", "trial", "commit", "model", "searched", "space"),
    *("digest", "dataset"),
    *("best_valid", "test", "epochs", "best_epoch", "seconds", "targets_per_second", "parameters"),
    *("candidates", "valid_targets", "test_targets", "peak_rss_mb", "versions", "device"),
)


class _Facts(Layout):
    """``facts.json``: digest of a run -> its facts."""

    __pydantic_extra__: dict[str, RunFacts]


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
            raise UsageError(
                f"--known: {short(str(path))} is not a folder of `compare --pack`: it has no "
                f"{_FACTS}"
            )
        content = read_bounded(self.path / _FACTS)
        facts = parse(_Facts, content, str(self.path / _FACTS)).model_dump(exclude_unset=True)
        known_from = {"status": DONE, KNOWN_FROM: self.path.name}
        self.fits = {digest: {**run, **known_from} for digest, run in facts.items()}
        self.epochs = self._read(_EPOCHS).to_pandas()
        self.used: set[str] = set()

    def read_ranks(self, digest: str, config: PosConfig, dataset: Any) -> pd.DataFrame | None:
        """Return the table of ranks that the folder of a run has; None if the run has no ranks.

        A UsageError refuses ranks that do not fit the dataset, or the metrics of the run.

        Args:
            digest: digest of a kept run.
            config: configuration of the run, with paths of this machine.
            dataset: dataset of the configuration.
        """
        test = self.fits[digest].get("test")
        if test is None:  # trials of a search are not tested
            return None
        prefix = f"{self.path / _RANKS}: run {digest}"
        columns = self._read(_RANKS, [digest])
        if digest not in columns.column_names:
            raise UsageError(f"{prefix}: it has no ranks, and was tested")
        rank = columns[digest].drop_null().to_numpy().astype(np.int64)
        targets = np.flatnonzero(dataset.split.find_targets(TEST))
        if len(rank) != len(targets):
            raise UsageError(f"{prefix}: {len(rank):,} ranks of {len(targets):,} targets")
        require_metrics(test, rank, config["metric_decimal_place"], prefix)
        return make_rank_table(dataset, targets, rank, config["timestamp_unit"])

    def restore(self, digest: str, folder: StudyFolder, config: PosConfig, dataset: Any) -> None:
        """Write a run into a study's folder, as if it had been trained there, but without weights.

        The other arguments and the errors are as of :meth:`read_ranks`. An error leaves no file.
        """
        ranks = self.read_ranks(digest, config, dataset)
        run = folder.run(digest)
        make_folder(run.path)
        run.write_config(config.plain)
        lines = self.epochs[self.epochs["digest"] == digest].drop(columns="digest")
        epochs = [line.dropna().to_dict() for _, line in lines.iterrows()]
        run.write_metrics({"epoch": int(valid.pop("epoch")), "valid": valid} for valid in epochs)
        if ranks is not None:
            run.write_ranks(ranks)
        folder.write_fit(digest, self.fits[digest])  # last: it marks the run as done

    def __str__(self) -> str:
        """Return a sentence on how many of the runs belong to the present study."""
        summary = f"{self.path}: {len(self.used)} of its {len(self.fits)} runs are of this study"
        if len(self.used) < len(self.fits):
            summary += "; the others are of other configurations, data or seeds"
        return summary

    def _read(self, name: str, columns: list[str] | None = None) -> pa.Table:
        """Return the columns of a parquet file of the folder, those of them that it has."""
        try:
            return pq.ParquetFile(self.path / name).read(columns)
        except (OSError, pa.ArrowException) as error:
            raise UsageError(f"{self.path / name} cannot be read: {error}") from error


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
        for epoch in parse_epochs(read_bounded(run.metrics), str(run.metrics)):
            epochs.append({"digest": digest, "epoch": epoch.epoch, **(epoch.valid or {})})
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
