"""Datasets in parts, ``data_part: by_rank``: a process reads the interactions of its own users.

Process r reads ``NAME.r.inter``, and all read the same ``NAME.item``, whose order numbers items.
What counts over all users is summed here, once, after the split: popularity and targets of items,
numbers of users, interactions and targets, the digest of the data. Options that need all users in
one process are refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from recbole_pos.data.location import PARQUET
from recbole_pos.data.splits import PHASES, TRAIN, read_split
from recbole_pos.data.targets import count_phases
from recbole_pos.distributed import current_shard, gather_objects, sum_over_processes
from recbole_pos.errors import UsageError
from recbole_pos.values import Options, listed, shown

BY_RANK = "by_rank"
_COUNTED_METRICS = {"averagepopularity", "tailpercentage"}  # which read RecBole's own counts


@dataclass(frozen=True)
class Totals:
    """Counts over all parts of a dataset.

    Attributes:
        users, events: numbers of users and of interactions.
        popularity: [items] int64 training interactions of each item.
        target_counts: [items] int64 how often each item is a target in an epoch of training.
    """

    users: int
    events: int
    popularity: np.ndarray
    target_counts: np.ndarray


def is_part(config: Options) -> bool:
    """Return whether a process reads only its own users."""
    return bool(config["data_part"] == BY_RANK)


def list_parts(config: Options) -> list[str] | None:
    """Return the parts in the names of files of interactions; None if there is one file.

    Under ``data_part: by_rank`` it is the rank of this process, else ``benchmark_filename``.
    """
    if not is_part(config):
        return config["benchmark_filename"]
    shard = current_shard()
    if shard.is_alone:
        raise UsageError(
            "data_part: by_rank divides users among the processes of one run, and this is one "
            "process; start a process a part by run --nproc or torchrun, or set data_part: none"
        )
    return [str(shard.rank)]


def check_parts(config: Mapping[str, Any]) -> None:
    """Refuse options that need the interactions of all users in one process."""
    fields = [config[key] for key in ("USER_ID_FIELD", "ITEM_ID_FIELD", "TIME_FIELD")]
    load_col = config["load_col"] or {}
    loads_more = not set(load_col.get("inter") or "*") <= {*fields} or bool(load_col.get("user"))
    metrics = config["metrics"]
    metrics = [metrics] if isinstance(metrics, str) else metrics
    empty = ("benchmark_filename", "session_filter", "update_from")
    allowed = {  # option -> whether its value is, and what is expected
        **{name: (not config[name], "none") for name in empty},
        "load_col": (not loads_more, f"{{inter: [{listed(fields)}]}}, and any fields of item"),
        "eval_args.split": (read_split(config["eval_args"])[0] in ("LS", "RS"), "LS or RS"),
        "eval_args.cold_items": (config["eval_args"]["cold_items"] == "keep", "keep"),
        "item_inter_num_interval": (
            config["item_inter_num_interval"] in (None, "[0,inf)"),
            "none (filter the files before they are divided)",
        ),
        "filter_inter_by_user_or_item": (config["filter_inter_by_user_or_item"] is True, "True"),
        "augmentation": (config["augmentation"] == "all_positions", "all_positions"),
        "metrics": (
            not {str(name).lower() for name in metrics} & _COUNTED_METRICS,
            "no metric that counts training interactions",
        ),
    }
    for name, (is_allowed, expected) in allowed.items():
        if not is_allowed:
            key, _, inner = name.partition(".")
            value = config[key][inner] if inner else config[key]
            raise UsageError(
                f"{name}: found {shown(value)}, expected {expected}, since under data_part: "
                "by_rank a process has a part of the users; or set data_part: none"
            )


def require_all_parts(folder: Path, name: str) -> None:
    """Refuse a part that no process of the run would read."""
    size = current_shard().size
    names = (file.name.removesuffix(PARQUET) for file in folder.glob("*.inter*"))
    numbers = [text.removeprefix(f"{name}.").removesuffix(".inter") for text in names]
    if unread := sorted(int(text) for text in numbers if text.isdigit() and int(text) >= size):
        raise UsageError(
            f"data_part: {folder / name}.{unread[0]}.inter is read by process {unread[0]}, and the "
            f"run has {size} processes, from 0; start one for each part"
        )


def join_parts(dataset: Any) -> None:
    """Check that the parts of all processes fit together; set what counts over all of them.

    It sets ``totals``, the counts of the split and the ``identity`` of a dataset with a split. All
    processes of the run must call it, and all raise its UsageErrors.
    """
    names = dataset.field2id_token
    identity = dataset.identity
    items = hashlib.blake2b("\0".join(names[dataset.iid_field]).encode()).hexdigest()
    own = {
        "data": identity["data"],
        "items": {dataset.iid_field: items, **identity["fields"]},
        "users": dataset.user_num - 1,
        "events": len(dataset.log),
    }
    parts = gather_objects(own)
    for number, part in enumerate(parts):
        for field, digest in parts[0]["items"].items():
            if part["items"].get(field) != digest:
                raise UsageError(
                    f"data_part: {dataset.dataset_name}.item of process {number} has another "
                    f"{field} than that of process 0; give all machines the same file"
                )
    _refuse_shared_users(names[dataset.uid_field][1:])
    counts = np.stack((dataset.popularity, dataset.target_counts))
    summed = sum_over_processes(torch.from_numpy(counts).to(dataset.config["device"]))
    popularity, target_counts = summed.long().cpu().numpy()
    dataset.split = replace(dataset.split, summary=_sum_counts(dataset, popularity))
    data = hashlib.blake2b("".join(part["data"] for part in parts).encode(), digest_size=32)
    dataset.identity = {**identity, "data": data.hexdigest()}
    users, events = (sum(part[key] for part in parts) for key in ("users", "events"))
    dataset.totals = Totals(users, events, popularity, target_counts)


def _refuse_shared_users(names: np.ndarray) -> None:
    """Refuse a user of two parts; names [users] are compared by digests of 64 bits."""
    own = pd.util.hash_array(names.astype(object), categorize=False)
    parts = gather_objects(own)
    digests, counts = np.unique(np.concatenate(parts), return_counts=True)
    if (counts == 1).all():
        return
    shared = digests[counts > 1]
    owners = [str(number) for number, part in enumerate(parts) if shared[0] in part]
    user = next(found[0] for found in gather_objects(names[own == shared[0]]) if len(found))
    raise UsageError(
        f"data_part: {len(shared):,} users are in several parts, such as {shown(str(user))} in "
        f"those of processes {' and '.join(owners)}; write all interactions of a user to one file"
    )


def _sum_counts(dataset: Any, popularity: np.ndarray) -> dict[str, Any]:
    """Return the summary of the split over all parts, by the popularity of items in all."""
    split = dataset.split
    is_cold = popularity == 0  # by item
    held_out = np.flatnonzero(split.is_target & (split.part != TRAIN))
    cold = held_out[is_cold[split.log.items.numpy()[held_out]]]
    own = {**split.summary, "cold_targets": count_phases(split.part[cold])}
    parts = gather_objects(own)
    for phase in PHASES:
        lacking = [n for n, part in enumerate(parts) if not part["targets"][phase]]
        if lacking and (phase == PHASES[TRAIN] or len(lacking) < len(parts)):
            raise UsageError(
                f"data_part: the part of process {lacking[0]} has no {phase} target; give it more "
                "users, or start fewer processes"
            )
    summed = {
        name: {phase: sum(part[name][phase] for part in parts) for phase in PHASES}
        for name, counts in own.items()
        if isinstance(counts, dict) and counts.keys() == {*PHASES}
    }
    return {**own, **summed, "items_without_training": int(is_cold[1:].sum())}
