"""One training run in a process, which resumes from the last checkpoint of a lost process.

:func:`train_run` trains a run in its own folder, which all machines must reach. Its data were read
once, by the command, and are shared by all runs as :class:`SharedData`.
"""

from __future__ import annotations

import copy
import gc
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from recbole_pos.config.plugins import unpack
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.dataset import Dataset
from recbole_pos.data.interactions import wrap_read_only
from recbole_pos.errors import PosError, UsageError
from recbole_pos.experiment.device import is_out_of_memory
from recbole_pos.experiment.diagnosis import locate_in_custom_code
from recbole_pos.experiment.folder import RunFolder, copy_run
from recbole_pos.experiment.train import train
from recbole_pos.reporter import Reporter
from recbole_pos.runs import DONE, FAILED
from recbole_pos.values import shown

MOST_LOSSES = 3  # how often a run is resumed whose process or machine was lost
QUIET = {"show_progress": False}  # options of all runs: nobody sees the output of Ray's processes


@dataclass(frozen=True)
class Resources:
    """The resources of a training run.

    Attributes:
        cpus: number of CPUs, which is also the number of threads.
        gpus: number of GPUs; with a fraction, several runs share one.
    """

    cpus: float = 1
    gpus: float = 0

    def __str__(self) -> str:
        """Return ``1 CPU and 0.5 GPU a training``."""
        return f"{self.cpus:g} CPU and {self.gpus:g} GPU a training"


def count_runs(machines: Sequence[Mapping[str, float]], resources: Resources) -> int:
    """Return how many runs some machines can train at the same time.

    On each machine, the scarcest resource limits the number of runs: 8 CPUs and 2 GPUs hold two
    runs of 1 CPU and 1 GPU.

    Args:
        machines: for each machine, ``CPU`` and ``GPU`` -> number of each.
        resources: CPUs and GPUs of a run.

    Raises:
        UsageError: if no machine has the resources of a run.
    """
    rounding = 1e-9  # 0.3 GPUs hold three runs of 0.1, although 0.3 / 0.1 < 3
    num_runs = 0
    for machine in machines:
        limits = [machine.get("CPU", 0) / resources.cpus]
        if resources.gpus:
            limits.append(machine.get("GPU", 0) / resources.gpus)
        num_runs += int(min(limits) + rounding)
    if not num_runs:
        found = "; ".join(f"{m.get('CPU', 0):g} CPUs, {m.get('GPU', 0):g} GPUs" for m in machines)
        raise UsageError(
            f"--cpus_per_trial, --gpus_per_trial: no machine has {resources.cpus:g} CPUs and "
            f"{resources.gpus:g} GPUs for a run; found {shown(found)}"
        )
    return num_runs


class SharedData:
    """A prepared dataset whose columns are numpy arrays, which Ray keeps once per machine.

    Arrays are mapped into every process on the machine that reads them; tensors would be copied.
    Test interactions are cut out unless they are needed: a trial of a search cannot read what it
    does not have.

    Attributes:
        dataset: the dataset. Its interactions have numpy arrays in place of tensors.
    """

    def __init__(self, dataset: Dataset, includes_test: bool = False) -> None:
        """Make a copy of a dataset with arrays in place of tensors.

        Processes can share the memory of numpy arrays, while each would get a copy of a tensor.

        Args:
            dataset: the dataset with its split, which stays as it is.
            includes_test: whether test interactions are kept.
        """
        reduced = copy.copy(dataset) if includes_test else dataset.without_test()
        # The hash of the whole dataset. The copy cannot compute it itself: it needs tensors, and
        # all interactions.
        reduced.identity = dataset.identity
        reduced.config = {}  # large to copy; make_dataset puts in the configuration of a run
        arrays = {name: column.numpy() for name, column in reduced.split.log.fields.items()}
        self.dataset = _replace_columns(reduced, arrays)

    def make_dataset(self, config: Any) -> Dataset:
        """Return the dataset for the configuration of a run, with tensors of the shared arrays.

        The arrays are not copied, and so must not be written to.

        Args:
            config: configuration of the run. Options of the model may differ from those of the
                dataset, options of the data may not.
        """
        # ``fields`` has the columns of the log of all interactions, by name. ``wrap_read_only``
        # makes a tensor that uses the memory of an array, and ``for_config`` a dataset with the
        # options of the run.
        arrays: dict[str, Any] = self.dataset.split.log.fields
        tensors = {name: wrap_read_only(array) for name, array in arrays.items()}
        return _replace_columns(self.dataset, tensors).for_config(config)


def _replace_columns(dataset: Dataset, columns: dict[str, Any]) -> Dataset:
    """Return a copy of a dataset whose interactions have other columns, such as arrays or tensors.

    Copied are only the objects that lead to the columns: the dataset, its split, and the log of all
    interactions in it. All else is shared with the given dataset, which stays as it is.

    Args:
        dataset: the dataset.
        columns: name of a field, such as ``item_id`` -> its new column.
    """
    copied = copy.copy(dataset)
    log = replace(dataset.split.log, fields=columns)
    copied.split = replace(dataset.split, log=log)
    return copied


def train_run(
    plain: dict[str, Any],
    path: str,
    data: Any,
    resources: Resources,
    packed: bytes = b"",
    tested_run: str | None = None,
    report: Callable[[Any], None] | None = None,
) -> dict[str, Any]:
    """Train a run in this process and, where there are test interactions, test it.

    A failure is not raised but returned, since Ray would train the run again after an exception.

    Args:
        plain: options of the configuration.
        path: folder of the run. If it has a checkpoint, the run resumes from it.
        data: the :class:`SharedData` of the run.
        resources: CPUs and GPUs of this process.
        packed: code of custom models and schemes as bytes, from ``plugins.pack``, which are
            registered in this process; empty if there are none.
        tested_run: folder of a trained run whose weights are only tested: the best trial of a
            search, which had no test interactions, or a run of another configuration. None to
            train.
        report: called with the experiment after every validated epoch, once its checkpoint is
            written; and once if no epoch is left to train.

    Returns:
        ``status``, ``done`` or ``failed``. For a finished run also the content of its
        ``result.json``. For a failed one the ``reason``, and ``lost``: whether the disk or Ray
        failed, and not the run itself.
    """
    torch.set_num_threads(max(1, int(resources.cpus)))
    logging.getLogger().setLevel(logging.WARNING)  # without RecBole's reports of every step
    try:
        # The folder of the run; a run that is only tested begins as a copy of the trained one,
        # whose training has ended. ``unpack`` registers the custom models.
        unpack(packed)
        run = RunFolder(path)
        if not run.path.parent.is_dir():
            raise UsageError(
                f"{socket.gethostname()} does not see {run.path.parent}: give a --run_dir that all "
                "machines reach"
            )
        if tested_run is not None and not run.checkpoint.is_file():
            copy_run(RunFolder(tested_run), run)

        # The configuration with the GPUs of this process. ``config.plain``, the options that are
        # written into the folder, keeps the ``gpu_id`` of the run, which is not of this machine.
        options = {**plain, "gpu_id": _list_gpus(resources)}
        config = PosConfig(config_dict=options, strict=False)
        if "gpu_id" in plain:
            config.plain["gpu_id"] = plain["gpu_id"]

        # Train from the beginning, or from the checkpoint of a process that was lost.
        resumed = run if run.checkpoint.is_file() else None
        dataset = data.make_dataset(config)
        result = train(config, resumed, run.path, Reporter(enabled=False), dataset, report)
        assert result is not None  # only further processes of a distributed run return None
        return {"status": DONE, **asdict(result)}
    except Exception as error:
        reason = explain_failure(error)
        is_of_ray = type(error).__module__.startswith("ray.")  # which may not be imported here
        is_system = isinstance(error, OSError) or is_of_ray
        # Too little memory can be an OSError as well, but it comes again when the run is repeated.
        is_lost = is_system and not reason.startswith("out of memory")
        return {"status": FAILED, "lost": is_lost, "reason": reason}
    finally:
        # Free memory, since this process trains the next run.
        gc.collect()
        if resources.gpus:
            torch.cuda.empty_cache()


def _list_gpus(resources: Resources) -> str:
    """Return the GPUs that Ray gave this process, such as ``0,1``, as the option ``gpu_id``.

    Args:
        resources: CPUs and GPUs of the run; without GPUs the option is empty.
    """
    if not resources.gpus:
        return ""
    import ray  # only Ray assigns GPUs; local runs, which use CPUs, do without the import

    # RecBole trains on the GPUs of this option. The gpu_id that the user has set for the study or
    # the search is not taken: it is the same for all runs, which would then share one GPU.
    return ",".join(str(gpu) for gpu in ray.get_gpu_ids())


def explain_failure(error: BaseException) -> str:
    """Return, in one line, why a training run has failed.

    The message of an error of this package stands for itself. Of another error the type is named,
    too, and the file and line if it came from the user's custom code (such as a model).

    Args:
        error: the exception that ended the run.
    """
    text = str(error).strip().partition("\n")[0]
    if is_out_of_memory(error):
        return f"out of memory: {text}" if text else "out of memory"
    if isinstance(error, PosError):
        return text
    # Such as "my_model.py, line 12"; None if the error is from elsewhere.
    location = locate_in_custom_code(error)
    return f"{type(error).__name__}: {text}" + (f" ({location})" if location else "")
