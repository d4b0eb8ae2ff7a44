"""A trained model as an object, without what reads histories, which ``recommender.py`` adds."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from recbole_pos.conversion.convert import Dataset
from recbole_pos.data.interactions import YEAR, counts_time
from recbole_pos.data.protocol import masks_history
from recbole_pos.errors import RunWarning, UsageError
from recbole_pos.experiment.build import Experiment
from recbole_pos.experiment.folder import (
    SEARCH,
    Result,
    RunFolder,
    copy_run,
    count_parameters,
    is_unfinished,
    make_folder,
    read_result,
)
from recbole_pos.experiment.run import Catalogue, describe_evaluation, evaluate
from recbole_pos.layers.large_products import Choice, products
from recbole_pos.serve.explain import BATCH
from recbole_pos.serve.histories import read_moment
from recbole_pos.serve.scorer import Histories, Scorer, find_best_items, require_k, to_columns
from recbole_pos.values import SECONDS, is_number, read_names, shown


class FittedModel:
    """What a trained :class:`~recbole_pos.Recommender` can do before it reads a history.

    It tells facts and metrics of the model, saves its folder, finds items like others, and decides
    at which time recommendations are asked for.

    Attributes:
        experiment: all of what follows but the folder.
        config, dataset, model: the configuration, the dataset and the torch module.
        loaders: loaders of batches by phase: train, valid, test; empty without the dataset.
        trainer: the trainer of the model; None without the dataset.
        folder: folder of the run; None for a model that RecBole's own functions have trained.
        num_added: number of items that ``add_items`` has added.
        resources: objects to keep as long as the model: its dataset, and temporary folders.
        items, ids, scorer: names of items, their ids by name, and what scores them; set by the
            subclass.
    """

    items: np.ndarray
    ids: dict[str, int]
    scorer: Scorer

    def __init__(
        self, experiment: Experiment, folder: RunFolder | None, resources: Sequence[Any]
    ) -> None:
        """Make the parts of an experiment (model, dataset, trainer, ...) attributes of the object.

        Args:
            experiment: the trained model with all that belongs to it.
            folder: folder of the run; None for a model that RecBole's own functions have trained.
            resources: objects that must live as long as this one, such as temporary folders.
        """
        self.experiment, self.folder, self.resources = experiment, folder, resources
        self.config, self.dataset = experiment.config, experiment.dataset
        self.model, self.loaders = experiment.model, experiment.loaders
        self.trainer = experiment.trainer
        self.num_added = 0

    @property
    def result(self) -> Result | None:
        """The result of the run; None if it is not finished."""
        if self.folder is None or not self.folder.result.is_file():
            return None
        return read_result(self.folder)

    def evaluate(
        self,
        metrics: str | Sequence[str] | None = None,
        topk: int | Sequence[int] | None = None,
        part: str = "test",
        mask_history: bool | None = None,
    ) -> pd.DataFrame:
        """Compute metrics of the model on interactions that were held out from its training.

        Args:
            metrics: names such as ``NDCG``; by default those of the run.
            topk: lengths of the rankings that metrics read; by default those of the run.
            part: which held-out interactions are the targets, ``test`` or ``valid``.
            mask_history: whether seen items are no candidates; by default as in the run.

        Returns:
            A row for each metric, in one column named like the part. ``attrs`` has the protocol:
            model, dataset, targets, split, candidates, seed, ...

        Raises:
            UsageError: if the model has no run folder, or as in :func:`recbole_pos.evaluate`.
        """
        # A UsageError that begins with "evaluate" if the model has no folder.
        folder = self._require_folder("evaluate")
        # A model loaded without data has a Catalogue (names of items and counts) in place of the
        # dataset; given None, `evaluate` reads the data from the disk.
        dataset = None if isinstance(self.dataset, Catalogue) else self.dataset
        scores = evaluate(folder.path, metrics, topk, part, mask_history, dataset=dataset)
        table = pd.DataFrame({part: pd.Series(scores, dtype=float)})
        table.index.name = "metric"
        table.attrs = self.collect_facts() | describe_evaluation(folder.path, part, mask_history)
        return table

    def collect_facts(self) -> dict[str, Any]:
        """Return facts of the model by name.

        Returns:
            Model, dataset, seed, and numbers of users, items, interactions and parameters. If the
            run is finished, also its epochs; how interactions were split; among which items
            (candidates) the tested ones were ranked, and how many they were; and warnings.
        """
        # Users and items without the padding id 0. A Catalogue is what a model that was loaded
        # without its dataset has: it knows the number of interactions, but not the log of them.
        config, dataset, result = self.config, self.dataset, self.result
        num_interactions = dataset.events if isinstance(dataset, Catalogue) else len(dataset.log)
        facts = {
            "model": config["model"],
            "dataset": config["dataset"],
            "users": dataset.user_num - 1,
            "items": dataset.item_num - 1,
            "interactions": num_interactions,
            "parameters": count_parameters(self.model),
            "seed": config["seed"],
        }
        if result is not None:
            facts |= {
                "epochs": result.epochs,
                "best_epoch": result.best_epoch,
                "split": result.split.get("split"),
                "candidates": result.candidates,
                "test_targets": result.test_targets,
                "warnings": result.warnings,
            }
        return facts

    def save(self, path: str | Path, data: bool | None = None) -> Path:
        """Copy the run into a folder, for :func:`recbole_pos.load`, ``serve`` and the like.

        Args:
            path: a new folder.
            data: whether to copy the dataset, too. Recommendations to its users need it, those to
                given histories do not. By default, it is copied if it is temporary or in the folder
                of the run. A dataset that is not copied is read from where this model found it.

        Returns:
            The folder.

        Raises:
            UsageError: if the folder holds a run already, or the model has no run folder.
        """
        # Refuse a folder in use. SEARCH is the file that the folder of a search (`tune`) has.
        target = RunFolder(path)
        if target.holds_run or (target.path / SEARCH).exists():
            raise UsageError(f"save: {target.path} holds a run already; name another folder")
        folder = self._require_folder("save")
        # Items of add_items are only in memory; ``stacklevel`` 2 names save's caller.
        if self.num_added:
            text = f"save: the {self.num_added:,} items of add_items are not saved; add them again"
            warnings.warn(text, RunWarning, stacklevel=2)

        # Copy the data, then the run, so that a run is there only if its data are.
        make_folder(target.path)
        dataset_folder = Path(self.config["data_path"])
        copies_data = self._has_own_data(folder) if data is None else data
        if copies_data:
            copy = target.data / self.config["dataset"]
            shutil.copytree(dataset_folder, copy, dirs_exist_ok=True)
        copy_run(folder, target, with_results=True)
        # Without a copy, config.yaml of the new folder must say where this model found the dataset.
        # There ``data_path`` is the folder that holds the dataset's folder. The option has it so in
        # ``plain``; in ``config``, RecBole has appended the name of the dataset.
        if not copies_data and dataset_folder.is_dir():
            data_path = self.config.plain["data_path"]
            target.write_config({**target.read_config(), "data_path": data_path})
        return target.path

    def _has_own_data(self, folder: RunFolder) -> bool:
        """Return whether the files of the dataset are in a temporary folder, or in that of the run.

        Args:
            folder: folder of the run. An earlier `save` may have put the dataset into its ``data``.
        """
        # ``resources`` are objects to keep as long as the model, such as a Dataset that was made of
        # a frame. The ``home`` of a Dataset is the temporary folder of its files, or None.
        datasets = [resource for resource in self.resources if isinstance(resource, Dataset)]
        if any(dataset.home is not None for dataset in datasets):
            return True
        return Path(self.config["data_path"]).is_relative_to(folder.data.resolve())

    def _require_folder(self, action: str) -> RunFolder:
        """Return the folder of the run; raise a UsageError if there is none.

        Args:
            action: what needs the folder, such as ``save``, with which the message begins.
        """
        if self.folder is None or not self.folder.checkpoint.is_file():
            raise UsageError(f"{action}: this model has no run folder; train it by recbole_pos.fit")
        return self.folder

    @cached_property
    def _counts_time(self) -> bool | None:
        """Whether values of the time field are dates up to 2100; None if the run does not say."""
        if isinstance(self.dataset, Catalogue):
            return self.dataset.counts_time
        return counts_time(self.dataset.log.times.numpy(), self.config["timestamp_unit"])

    @property
    def _unit(self) -> float | None:
        """Seconds in the unit of the time field; None if it only orders interactions.

        A run that does not say whether the field counts time is trusted to count it.
        """
        return None if self._counts_time is False else SECONDS[self.config["timestamp_unit"]]

    def _refuse_late_times(self, histories: Histories) -> None:
        """Raise a UsageError for a time after the year 2200, which surely is in a wrong unit.

        A time field that does not count time, but only orders interactions, may have any numbers.
        """
        if not self._counts_time:
            return
        # The year 2200 in the unit of the time field. YEAR is the number of seconds in a year,
        # SECONDS that in a unit.
        unit = self.config["timestamp_unit"]
        latest = (2200 - 1970) * YEAR / SECONDS[unit]
        for name, times in (("times", histories.times), ("at", histories.at)):
            if times is not None and (times > latest).any():
                raise UsageError(
                    f"{name}: {np.nanmax(times):.15g} is in no year that can be meant: the time "
                    f"field counts {unit} since 1970"
                )

    def add_request_time(
        self, histories: Histories, at: float | str | date | datetime | None = None
    ) -> Histories:
        """Add the time at which recommendations are asked for to histories, if the model reads it.

        A history with a time of its own keeps it; others get ``at``, or now.

        Args:
            histories: the histories.
            at: time of the requests, a number in the unit of the time field, text or a date; None
                to take now.

        Warns:
            RunWarning: if now is taken; Python prints it once for each line that calls this.

        Raises:
            UsageError: for a time that the model does not read, or after the year 2200, or before
                the newest interaction of its history.
        """
        if not self.scorer.reads_request:  # it was trained without request_time: target
            if at is None and histories.at is None:
                return histories
            raise UsageError(
                f"at: {self.config['model']} was trained with request_time: none and reads no time "
                "of a request; leave it out"
            )

        # The time for histories without one of their own, which are NaN in ``histories.at``.
        default: float | np.ndarray = np.nan
        if at is not None:
            default = read_moment(at, self._unit)
        elif histories.at is None or np.isnan(histories.at).any():
            default = self._take_now(histories)
        histories = histories.with_request_time(default)
        self._refuse_late_times(histories)
        return histories

    def _take_now(self, histories: Histories) -> np.ndarray:
        """Return the current time [b] in the unit of the time field, and warn that it is taken.

        A history whose newest interaction is later than this machine's clock, since another clock
        gave it its times, gets the time of that interaction.

        Raises:
            UsageError: if the time field counts no time, so that the current time is not in it.
        """
        if self._unit is None:
            raise UsageError("at: the time field counts no time; give at instead of now")
        warnings.warn("at: the model reads the time of requests: now is taken", RunWarning, 4)
        return np.maximum(time.time() / self._unit, histories.newest)

    def hides_seen(self, exclude_seen: bool | None) -> bool:
        """Return what the user says; for None, whether the run's evaluation hides seen items."""
        return masks_history(self.config) if exclude_seen is None else exclude_seen

    def choose_items(
        self,
        allowed: Iterable[str | int] | None = None,
        excluded: Iterable[str | int] | None = None,
        boosts: Mapping[str, float] | None = None,
    ) -> Choice:
        """Return the items that may be recommended and their boosts; unknown names are ignored.

        Args:
            allowed: names of the only items that may be recommended; by default all.
            excluded: names of items that may not be recommended.
            boosts: number to add to the score of an item, by name.

        Returns:
            The choice: ids of these items, ascending, and what is added to the score of each.

        Raises:
            UsageError: if no item is left, or a boost is not a number.
        """
        if allowed is None and excluded is None and boosts is None:
            return self._all_items

        # is_allowed [items + 1] by id. Without ``allowed`` all are; the id 0 is padding.
        ids = self.ids  # id of each known item by name
        is_allowed = torch.full((len(ids) + 1,), allowed is None)
        if allowed is not None:
            names = read_names(allowed, "allowed")
            is_allowed[[ids[name] for name in names if name in ids]] = True
        if excluded is not None:
            names = read_names(excluded, "excluded")
            is_allowed[[ids[name] for name in names if name in ids]] = False
        is_allowed[0] = False

        items = is_allowed.nonzero()[:, 0]
        if not len(items):
            raise UsageError("allowed, excluded (--items, --exclude): no item is left to recommend")
        if boosts is None:
            return Choice(items)

        # What is added to the score of each item, by id. Unknown names have the id 0, which is not
        # among ``items``.
        bonus = torch.zeros(len(ids) + 1)
        for name, boost in boosts.items():
            if not is_number(boost):
                raise UsageError(f"boosts: {shown(name)}: expected a number, found {shown(boost)}")
            bonus[ids.get(str(name), 0)] = float(boost)
        return Choice(items, bonus[items])

    @cached_property
    def _all_items(self) -> Choice:
        # The choice of every item, without boosts; ids begin at 1.
        return Choice(torch.arange(1, len(self.ids) + 1))

    def require_id(self, name: str) -> int:
        """Return the id of an item; raise a UsageError if it is not known."""
        if name not in self.ids:
            raise UsageError(f"item {shown(name)} is not known")
        return self.ids[name]

    def item_vectors(self) -> tuple[np.ndarray, np.ndarray]:
        """Return names [items] and vectors [items, d]; raise a UsageError if there are none."""
        # Row 0 of the scorer's vectors is padding.
        return self.items, self.scorer.require_vectors()[1:].cpu().numpy()

    def similar(
        self,
        items: str | Sequence[str],
        k: int = 10,
        allowed: Iterable[str | int] | None = None,
        excluded: Iterable[str | int] | None = None,
    ) -> pd.DataFrame:
        """Return the items that are most like given items, by the cosine of their vectors.

        Args:
            items: names of items, or one name.
            k: neighbours of each item; fewer if fewer are left.
            allowed: names of the items to choose from; by default all.
            excluded: names of items to leave out.

        Returns:
            A row per neighbour, nearest first: ``item``, ``rank`` from 1, ``similar``, ``cosine``.

        Raises:
            UsageError: for unknown items, or a model without item vectors.
        """
        names, k = read_names(items, "items"), require_k(k)
        ids = torch.tensor([self.require_id(name) for name in names], dtype=torch.int64)
        candidates = self.choose_items(allowed, excluded)  # items that may be neighbours

        # Find the k nearest candidates of b (BATCH) given items at a time. ``to_columns`` makes of
        # each batch four columns with an entry for each neighbour: the index in ``names`` of the
        # given item, the rank, the id of the neighbour, and the cosine.
        rankings = []
        for rows in torch.arange(len(ids)).split(BATCH):
            batch_ids = ids[rows]
            # A function from the ids of c candidates to their cosines [b, c] with the given items.
            cosines = partial(products, self._unit_vectors[batch_ids], self._unit_vectors)
            # No item is its own neighbour: row i of the cosines must not have the item
            # batch_ids[i]. Such pairs of a row and an id are left out (barred).
            barred = torch.arange(len(batch_ids)), batch_ids
            cosine, neighbour = find_best_items(cosines, candidates, k, barred)  # both [b, k]
            rankings.append(to_columns(names, rows.numpy(), cosine, neighbour))

        # Join the columns of all batches, and put names in place of ids, which begin at 1.
        row, rank, neighbour, cosine = map(np.concatenate, zip(*rankings, strict=True))
        table = {"item": np.array(names, dtype=object)[row], "rank": rank}
        table |= {"similar": self.items[neighbour - 1], "cosine": cosine}
        return pd.DataFrame(table)

    @cached_property
    def _unit_vectors(self) -> Tensor:
        """Vectors of the items [items + 1, d], scaled to length 1."""
        return torch.nn.functional.normalize(self.scorer.require_vectors(), dim=1).cpu()

    def __repr__(self) -> str:
        """Return lines about dataset, training, protocol, metrics and warnings.

        Without the result of a finished run there are only the first two. The protocol is how
        interactions were split, and among which items the held-out ones were ranked.
        """
        facts, result = self.collect_facts(), self.result
        counts = ", ".join(f"{facts[key]:,} {key}" for key in ("users", "items", "interactions"))
        headline = f"{facts['model']} on {facts['dataset']}: {counts}"
        if result is None:
            # Unknown: the model was trained by RecBole's own functions, without a run folder.
            is_stopped = self.folder is not None and is_unfinished(self.folder)
            return f"{headline}\ntraining: {'not finished' if is_stopped else 'unknown'}"
        split = ", ".join(f"{kind}: {value}" for kind, value in (facts["split"] or {}).items())
        lines = [
            headline,
            f"training: {result.epochs} epochs, best {result.best_epoch}, seed {result.seed}",
            f"protocol: split {split}; {result.test_targets:,} test targets among "
            f"{result.candidates}",
        ]
        for part, metrics in (("valid", result.best_valid), ("test", result.test)):
            if metrics:
                values = (f"{metric} {value:.4f}" for metric, value in metrics.items())
                lines.append(f"{part}: {', '.join(values)}")
        return "\n".join(lines + [f"warning: {text}" for text in result.warnings])


def find_run_folder(path: str | Path) -> RunFolder | None:
    """Return the folder of a run by its path, or by that of a file in it, such as the checkpoint.

    It is None for a folder without the configuration of a run: RecBole's own functions make such.
    """
    folder = RunFolder(Path(path).parent if Path(path).is_file() else path)
    return folder if folder.config.is_file() else None
