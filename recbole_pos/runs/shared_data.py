"""Data that are prepared once and shared by many training runs; trials get no test data."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from recbole_pos.data.dataset import PosDataset, PosSequentialDataset
from recbole_pos.data.interactions import wrap_read_only


class SharedData:
    """A prepared dataset as plain arrays, which Ray's object store keeps once per machine.

    Arrays are mapped into every process on the machine that reads them; tensors would be copied.
    Test interactions are cut out first: a trial cannot read what it does not have.

    Attributes:
        columns: the arrays of the interactions, by field.
        template: the dataset without them.
    """

    def __init__(
        self, dataset: PosDataset | PosSequentialDataset, includes_test: bool = False
    ) -> None:
        """Separate the columns of a copy of the dataset, after ``build``, from the rest."""
        template = copy.copy(dataset) if includes_test else dataset.without_test()
        template.identity = dataset.identity  # computed while the columns are still there
        split = template.split
        self.columns = {name: column.numpy() for name, column in split.log.fields.items()}
        template.split = replace(split, log=replace(split.log, fields={}))
        template.config = template.inter_feat = None
        self.template = template

    def make_dataset(self, config: Any) -> PosDataset | PosSequentialDataset:
        """Return the dataset for the configuration of a run; it reads the shared arrays."""
        dataset = copy.copy(self.template)
        fields = {name: wrap_read_only(column) for name, column in self.columns.items()}
        dataset.split = replace(dataset.split, log=replace(dataset.split.log, fields=fields))
        return dataset.for_config(config)
