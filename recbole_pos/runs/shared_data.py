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

    Args:
        dataset: the dataset, after ``build``.
        with_test: whether to keep test interactions, for runs that are tested.

    Attributes:
        columns: the arrays of the interactions, by field.
        shell: the dataset without them.
    """

    def __init__(self, dataset: PosDataset | PosSequentialDataset, with_test: bool = False) -> None:
        shell = copy.copy(dataset) if with_test else dataset.without_test()
        shell.identity = dataset.identity  # computed while the columns are still there
        split = shell.split
        self.columns = {name: column.numpy() for name, column in split.log.fields.items()}
        shell.split = replace(split, log=replace(split.log, fields={}))
        shell.config = shell.inter_feat = None
        self.shell = shell

    @property
    def nbytes(self) -> int:
        """Size of the shared arrays in bytes."""
        split = self.shell.split
        arrays = (*self.columns.values(), split.log.offsets, split.part, split.is_target)
        return sum(array.nbytes for array in arrays)

    def make_dataset(self, config: Any) -> PosDataset | PosSequentialDataset:
        """Return the dataset for the configuration of a run; it reads the shared arrays."""
        shell = copy.copy(self.shell)
        fields = {name: wrap_read_only(column) for name, column in self.columns.items()}
        shell.split = replace(shell.split, log=replace(shell.split.log, fields=fields))
        return shell.for_config(config)
