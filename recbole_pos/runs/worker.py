"""One training run in a process, which resumes from the last checkpoint of a lost process.

A run is trained in its own folder, which all machines must reach. Its data were read once, by the
command, and are shared by all runs.
"""

from __future__ import annotations

import copy
import gc
import logging
import re
import socket
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch

from recbole_pos.config.plugins import unpack
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.dataset import Dataset
from recbole_pos.data.interactions import wrap_read_only
from recbole_pos.errors import PosError, UsageError
from recbole_pos.experiment.diagnosis import locate_in_custom_code
from recbole_pos.experiment.folder import RunFolder, copy_run
from recbole_pos.experiment.train import train
from recbole_pos.reporter import Reporter
from recbole_pos.runs import DONE, FAILED
from recbole_pos.runs.resources import Resources

MOST_LOSSES = 3  # how often a run is resumed whose process or machine was lost
QUIET = {"show_progress": False}  # which has no use in a process of Ray
_OUT_OF_MEMORY = re.compile(
    "out of memory|can't allocate memory|not enough memory|unable to allocate", re.IGNORECASE
)


class SharedData:
    """A prepared dataset as plain arrays, which Ray's object store keeps once per machine.

    Arrays are mapped into every process on the machine that reads them; tensors would be copied.
    Test interactions are cut out first: a trial cannot read what it does not have.

    Attributes:
        columns: the arrays of the interactions, by field.
        template: the dataset without them.
    """

    def __init__(self, dataset: Dataset, includes_test: bool = False) -> None:
        """Separate the columns of a copy of the dataset from the rest."""
        template = copy.copy(dataset) if includes_test else dataset.without_test()
        template.identity = dataset.identity  # computed while the columns are still there
        split = template.split
        self.columns = {name: column.numpy() for name, column in split.log.fields.items()}
        template.split = replace(split, log=replace(split.log, fields={}))
        template.config = {}
        self.template = template

    def make_dataset(self, config: Any) -> Dataset:
        """Return the dataset for the configuration of a run; it reads the shared arrays."""
        dataset = copy.copy(self.template)
        fields = {name: wrap_read_only(column) for name, column in self.columns.items()}
        dataset.split = replace(dataset.split, log=replace(dataset.split.log, fields=fields))
        return dataset.for_config(config)


def train_run(
    plain: dict[str, Any],
    path: str,
    data: Any,
    resources: Resources,
    packed: bytes = b"",
    tested_run: str | None = None,
    report: Callable[[Any], None] | None = None,
) -> dict[str, Any]:
    """Train a run and, where there are test interactions, test it.

    Args:
        plain: options of the configuration.
        path: folder of the run, which resumes from a checkpoint in it.
        data: the :class:`SharedData` of the run.
        resources: resources of this process.
        packed: custom models and schemes that no import registers.
        tested_run: folder of a trained run whose weights are only tested: a chosen trial, which
            had no test interactions, or a run of another configuration; None to train.
        report: called with the experiment after every validated epoch, once its checkpoint is
            written, and once where no epoch is left.

    Returns:
        ``status``, done or failed. A finished run adds the content of its ``result.json``, a failed
        one the ``reason``, and ``lost``: whether the disk or Ray failed and not the run.
    """
    torch.set_num_threads(max(1, int(resources.cpus)))
    logging.getLogger().setLevel(logging.WARNING)  # without RecBole's reports of every step
    try:
        unpack(packed)
        run = RunFolder(path)
        if not run.path.parent.is_dir():
            raise UsageError(
                f"{socket.gethostname()} does not see {run.path.parent}: give a --run_dir that all "
                "machines reach"
            )
        if tested_run is not None and not run.checkpoint.is_file():
            copy_run(RunFolder(tested_run), run)
        options = {**plain, "gpu_id": _list_gpus(resources)}
        config = PosConfig(config_dict=options, strict=False)
        if "gpu_id" in plain:  # the folder keeps the value of the run, not of this machine
            config.plain["gpu_id"] = plain["gpu_id"]
        resumed = run if run.checkpoint.is_file() else None
        dataset = data.make_dataset(config)
        result = train(config, resumed, run.path, Reporter(enabled=False), dataset, report)
        assert result is not None  # as in the first process of every run
        return {"status": DONE, **asdict(result)}
    except Exception as error:
        reason = explain_failure(error)
        is_of_ray = type(error).__module__.startswith("ray.")  # which may not be imported here
        is_system = isinstance(error, OSError) or is_of_ray
        is_lost = is_system and not reason.startswith("out of memory")
        return {"status": FAILED, "lost": is_lost, "reason": reason}
    finally:
        gc.collect()  # the process continues with the next run
        if resources.gpus:
            torch.cuda.empty_cache()


def _list_gpus(resources: Resources) -> str:
    """Return the GPUs that Ray gave this process, as the option ``gpu_id``."""
    if not resources.gpus:
        return ""
    import ray  # only Ray assigns GPUs; local runs, which use CPUs, do without the import

    # RecBole sets CUDA_VISIBLE_DEVICES to it: by another value all runs would share the first GPU
    return ",".join(str(gpu) for gpu in ray.get_gpu_ids())


def explain_failure(error: BaseException) -> str:
    """Return the reason of a failed run in one line."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(text):
        return f"out of memory: {text}" if text else "out of memory"
    if isinstance(error, PosError):
        return text
    location = locate_in_custom_code(error)
    return f"{type(error).__name__}: {text}" + (f" ({location})" if location else "")
