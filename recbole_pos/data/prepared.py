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
from recbole_pos.data.splits import TEST, TRAIN
from recbole_pos.data.targets import Split, describe

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
        "arrays": sorted(arrays),
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
    """Give a dataset, of which nothing was read, what ``capture`` took of another.

    Raises:
        Exception: of any kind, if they are not what it took; the dataset is then as before.
    """
    _require(about["arrays"] == sorted(arrays))
    _require(about["feat_name_list"] == ["inter_feat", *about["tables"]])
    for names in (about["rest"], *about["alias"].values()):
        _require(isinstance(names, list) and all(isinstance(name, str) for name in names))
    sizes = {**about["field2seqlen"], **about["field2bucketnum"]}
    _require(all(type(size) is int for size in sizes.values()))
    user, item, time = dataset.uid_field, dataset.iid_field, dataset.time_field
    made = {name: about[name] for name in _PROPERTIES}
    made["field2type"] = {field: FeatureType(kind) for field, kind in about["types"].items()}
    made["field2source"] = {
        field: FeatureSource(source) if known else source
        for field, (known, source) in about["sources"].items()
    }
    made["alias"] = {name: np.array(fields) for name, fields in about["alias"].items()}
    made["_rest_fields"] = np.array(about["rest"])
    ids = {
        key: {name: i for i, name in enumerate(arrays[key].tolist())}
        for key in set(about["tokens"].values())
    }
    tokens = {field: arrays[key] for field, key in about["tokens"].items()}
    made["field2id_token"] = tokens
    made["field2token_id"] = {field: ids[key] for field, key in about["tokens"].items()}
    tables = {"user_feat": None, "item_feat": None}
    tables |= {name: Interaction(_tensors(_of(name, arrays))) for name in about["tables"]}
    log = EventLog(_tensors(_of("log", arrays)), arrays["offsets"], user, item, time)
    made["missing"], made["_preloaded_weight"] = _of("missing", arrays), _of("weight", arrays)
    made["events_of_users"] = arrays["events_of_users"]
    split = Split(log, arrays["part"], arrays["is_target"], about["summary"])
    made |= {**tables, "split": split, "identity": about["identity"]}
    _require_possible(made)
    for name, value in made.items():
        setattr(dataset, name, value)


def _require_possible(made: dict[str, Any]) -> None:
    """Whether values lie within their ranges, and arrays have the lengths that others need.

    Raises:
        Exception: of any kind, if not.
    """
    split, tokens = made["split"], made["field2id_token"]
    log, part, is_target = split.log, split.part, split.is_target
    users, items = (len(tokens[field]) for field in (log.user_field, log.item_field))
    events, offsets, lengths = len(log.items), log.offsets, log.lengths
    _require(offsets.dtype == np.int64 and offsets.shape == (users + 1,))
    _require(offsets[0] == 0 and offsets[-1] == events and (lengths >= 0).all() and lengths[0] == 0)
    some = np.flatnonzero(lengths)
    begins, column = offsets[some], log.users.numpy()
    for place in (begins, offsets[some + 1] - 1):
        _require(np.array_equal(column[place], some))
    _require(bool((column[1:] >= column[:-1]).all()))
    _require(log.times.dtype == torch.float64 and log.items.dtype == torch.int64)
    _require(events > 0 and int(log.items.min()) > 0)
    falls = np.flatnonzero(np.diff(part) < 0) + 1  # only between users
    _require(part.dtype == np.int8 and part.shape == (events,) and part.min() >= TRAIN)
    _require(part.max() <= TEST and np.isin(falls, begins).all())
    _require(is_target.dtype == np.bool_ and is_target.shape == (events,))
    _require(not is_target[begins].any())
    known = made["events_of_users"]
    _require(known.dtype == np.int64 and known.shape == (users,) and (known >= lengths).all())
    tables = {name: made[name].interaction for name in made["feat_name_list"][1:]}
    sizes = {"user_feat": users, "item_feat": items}
    for name, columns in {"inter_feat": log.fields, **tables}.items():
        rows = sizes.get(name, events if name == "inter_feat" else None)
        for field, column in columns.items():
            kind = made["field2type"][field].value
            wide = kind.endswith("seq") or made["field2bucketnum"].get(field, 2) > 2  # discretised
            _require(column.dim() == 1 + wide)
            _require(rows is None or len(column) == rows)
            if field in tokens:
                low, high = column.aminmax() if column.numel() else (0, 0)
                _require(column.dtype == torch.int64 and 0 <= low and high < len(tokens[field]))
            else:
                _require(column.dtype.is_floating_point and bool(column.isfinite().all()))
    for mask in made["missing"].values():
        _require(mask.dtype == np.bool_ and mask.shape in ((events,), (users,), (items,)))
    for field, weight in made["_preloaded_weight"].items():
        _require(weight.dtype.kind == "f" and len(weight) == len(tokens[field]))
    for names in tokens.values():
        _require(names.dtype.kind == "U" and names.ndim == 1 and names[0] == "[PAD]")
    describe(split.summary)  # has what is read of it
    identity, ids = made["identity"], {log.user_field, log.item_field, log.time_field}
    _require(isinstance(identity["data"], str))
    _require(all(isinstance(text, str) for text in identity["fields"].values()))
    feats = (log.fields, *(tables.get(name, {}) for name in sizes))
    _require(set(identity["fields"]) == set().union(*feats) - ids)


def _require(condition: bool | np.bool_) -> None:
    if not condition:
        raise ValueError("not what was kept")


def _named(room: str, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{room}/{name}": column for name, column in columns.items()}


def _of(room: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    start = f"{room}/"
    return {key.removeprefix(start): a for key, a in arrays.items() if key.startswith(start)}


def _tensors(columns: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(column) for name, column in columns.items()}
