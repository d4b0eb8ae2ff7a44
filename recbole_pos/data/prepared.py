"""A dataset that was filtered, numbered, sorted and split, as arrays and plain values.

What a cache keeps of it, and how it is made from that again: no step of preparing is done twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from recbole.data.interaction import Interaction
from recbole.utils import FeatureSource, FeatureType

from recbole_pos.data.events import EventLog
from recbole_pos.data.targets import Split

_PROPERTIES = ("field2seqlen", "field2bucketnum", "feat_name_list")


def capture(dataset: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays by name, and the rest as values that json keeps, of a dataset with its split."""
    log, split = dataset.log, dataset.split
    arrays = {
        "offsets": log.offsets,
        "part": split.part,
        "is_target": split.is_target,
        "events_of_users": dataset.events_of_users,
        **_named("log", {name: column.numpy() for name, column in log.fields.items()}),
        **_named("missing", dataset.missing),
        **_named("weight", dataset._preloaded_weight),
    }
    tables = [name for name in dataset.feat_name_list if name != "inter_feat"]
    for table in tables:
        columns = getattr(dataset, table).interaction
        arrays |= _named(table, {name: column.numpy() for name, column in columns.items()})
    tokens: dict[str, str] = {}  # fields that share names have them in one array
    for field, names in dataset.field2id_token.items():
        same = next((f for f in tokens if dataset.field2id_token[f] is names), field)
        tokens[field] = f"tokens/{same}"
        arrays[tokens[field]] = names
    about = {
        **{name: getattr(dataset, name) for name in _PROPERTIES},
        "types": {field: kind.value for field, kind in dataset.field2type.items()},
        "sources": {
            field: [isinstance(source, FeatureSource), getattr(source, "value", source)]
            for field, source in dataset.field2source.items()
        },
        "alias": {name: list(fields) for name, fields in dataset.alias.items()},
        "rest": list(dataset._rest_fields),
        "tokens": tokens,
        "tables": tables,
        "summary": split.summary,
        "identity": dataset.identity,
    }
    return arrays, about


def restore(dataset: Any, arrays: dict[str, np.ndarray], about: dict[str, Any]) -> None:
    """Give a dataset, of which nothing was read, what ``capture`` took of another."""
    for name in _PROPERTIES:
        setattr(dataset, name, about[name])
    dataset.field2type = {field: FeatureType(kind) for field, kind in about["types"].items()}
    dataset.field2source = {
        field: FeatureSource(source) if known else source
        for field, (known, source) in about["sources"].items()
    }
    dataset.alias = {name: np.array(fields) for name, fields in about["alias"].items()}
    dataset._rest_fields = np.array(about["rest"])
    ids = {
        key: {name: i for i, name in enumerate(arrays[key].tolist())}
        for key in set(about["tokens"].values())
    }
    for field, key in about["tokens"].items():
        dataset.field2id_token[field], dataset.field2token_id[field] = arrays[key], ids[key]
    dataset.user_feat = dataset.item_feat = None
    for table in about["tables"]:
        setattr(dataset, table, Interaction(_tensors(_of(table, arrays))))
    dataset.missing = _of("missing", arrays)
    dataset._preloaded_weight = _of("weight", arrays)
    dataset.events_of_users = arrays["events_of_users"]
    dataset.split = Split(
        EventLog(
            _tensors(_of("log", arrays)),
            arrays["offsets"],
            dataset.uid_field,
            dataset.iid_field,
            dataset.time_field,
        ),
        arrays["part"],
        arrays["is_target"],
        about["summary"],
    )
    dataset.identity = about["identity"]


def _named(room: str, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{room}/{name}": column for name, column in columns.items()}


def _of(room: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    start = f"{room}/"
    return {key.removeprefix(start): a for key, a in arrays.items() if key.startswith(start)}


def _tensors(columns: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(column) for name, column in columns.items()}
