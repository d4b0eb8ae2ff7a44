"""The vocabulary in a run folder, in place of its dataset: enough to answer given histories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from recbole_pos.data.identity import Vocabulary
from recbole_pos.errors import UsageError
from recbole_pos.values import Options


class NeedsDataset(UsageError):
    """A question cannot be answered without the dataset.

    Args:
        missing: what must be read from the dataset, and why.
        config: configuration of the run.
    """

    def __init__(self, missing: str, config: Options) -> None:
        name, data_path = config["dataset"], Path(config["data_path"]).parent
        super().__init__(
            f"{missing} must be read from the dataset {name!r}, which was not found in {data_path};"
            f" give --data_path (in Python data_path=), the folder that holds {name}/"
        )


class Catalogue:
    """Names of users and items by id, and how often items occur in training.

    A model is built with a catalogue as with a dataset; anything else that it reads of a dataset
    raises :class:`NeedsDataset`.

    Args:
        config: configuration of the run.
        vocabulary: vocabulary of the run, from its folder.
    """

    has_log = False  # there are no interactions for a model to check

    def __init__(self, config: Options, vocabulary: Vocabulary) -> None:
        self.config, self.dataset_name = config, config["dataset"]
        self.uid_field, self.iid_field = config["USER_ID_FIELD"], config["ITEM_ID_FIELD"]
        self.field2id_token, self._vocabulary = vocabulary.tokens, vocabulary
        self.user_num, self.item_num = self.num(self.uid_field), self.num(self.iid_field)
        self.events = int(vocabulary.events.sum())

    @property
    def popularity(self) -> np.ndarray:
        """[items] int64 training interactions of each item, by id; not kept by runs of 0.1."""
        if self._vocabulary.popularity is None:
            raise NeedsDataset("the popularity of items", self.config)
        return self._vocabulary.popularity

    def num(self, field: str) -> int:
        """Return how many ids a field has, padding included."""
        if field not in self.field2id_token:
            raise NeedsDataset(f"{self.config['model']}: the field {field!r}", self.config)
        return len(self.field2id_token[field])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python asks of any object
            raise AttributeError(name)
        missing = f"{self.config['model']}: {name.lstrip('_')}, of interactions or attributes,"
        raise NeedsDataset(missing, self.config)
