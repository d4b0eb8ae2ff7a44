"""The vocabulary in a run folder, in place of its dataset: enough to answer given histories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from recbole_pos.data.identity import Known
from recbole_pos.errors import UsageError
from recbole_pos.values import Options

_CONTENT = {
    "log": "interactions",
    "inter_feat": "interactions",
    "inter_matrix": "interactions",
    "history_item_matrix": "interactions",
    "item_feat": "attributes of items",
    "user_feat": "attributes of users",
}


class NeedsDataset(UsageError):
    """A question cannot be answered without the dataset.

    Args:
        what: what must be read from the dataset, and why.
        config: configuration of the run.
    """

    def __init__(self, what: str, config: Options) -> None:
        name, base = config["dataset"], Path(config["data_path"]).parent
        super().__init__(
            f"{what} must be read from the dataset {name!r}, which was not found in {base}; give "
            f"--data_path (in Python data_path=), the folder that holds {name}/"
        )


class Catalogue:
    """Names of users and items by id, and how often items occur in training.

    A model is built with a catalogue as with a dataset; anything else that it reads of a dataset
    raises :class:`NeedsDataset`.

    Args:
        config: configuration of the run.
        known: vocabulary of the run, from its folder.

    Attributes:
        popularity: [items] int64 training events of each item, by id.
    """

    has_log = False  # there are no interactions for a model to check

    def __init__(self, config: Options, known: Known) -> None:
        self.config, self.dataset_name = config, config["dataset"]
        self.uid_field, self.iid_field = config["USER_ID_FIELD"], config["ITEM_ID_FIELD"]
        self.field2id_token = known.tokens
        self.user_num, self.item_num = self.num(self.uid_field), self.num(self.iid_field)
        self.events = int(known.events.sum())
        self._popularity = known.popularity

    @property
    def popularity(self) -> np.ndarray:
        if self._popularity is None:
            raise self._lacks(
                "the popularity of items, which runs of earlier versions do not keep,"
            )
        return self._popularity

    def num(self, field: str) -> int:
        """Return how many ids a field has, padding included."""
        if field not in self.field2id_token:
            raise self._lacks(f"the field {field!r}")
        return len(self.field2id_token[field])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python asks of any object
            raise AttributeError(name)
        raise self._lacks(_CONTENT.get(name, name))

    def _lacks(self, what: str) -> NeedsDataset:
        return NeedsDataset(f"{self.config['model']}: {what}", self.config)
