"""A prepared dataset (filtered, numbered, sorted, split) as arrays and plain values, and back.

The cache stores these, so that no step of preparing is done twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from recbole.data.interaction import Interaction
from recbole.utils import FeatureSource, FeatureType

from recbole_pos.data.events import EventLog
from recbole_pos.data.splits import TEST, TRAIN
from recbole_pos.data.targets import Split, describe

_PLAIN = ("field2seqlen", "field2bucketnum", "feat_name_list", "identity")


def capture(dataset: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the state of a dataset with its split, for :func:`restore`.

    Returns:
        arrays by name, and all else as values that json keeps.
    """
    log, split = dataset.log, dataset.split
    groups = {"log": log.fields, "missing": dataset.missing, "weight": dataset._preloaded_weight}
    groups |= {n: getattr(dataset, n).interaction for n in dataset.feat_name_list[1:]}
    arrays = {
        "offsets": log.offsets,
        "part": split.part,
        "is_target": split.is_target,
        "events_of_users": dataset.events_of_users,
        **{
            f"{group}/{name}": np.asarray(column)
            for group, columns in groups.items()
            for name, column in columns.items()
        },
    }
    tokens: dict[str, str] = {}  # fields that share names have them in one array
    for field, names in dataset.field2id_token.items():
        same = next((f for f in tokens if dataset.field2id_token[f] is names), field)
        tokens[field] = f"tokens/{same}"
        arrays[tokens[field]] = names
    state = {
        **{name: getattr(dataset, name) for name in _PLAIN},
        "arrays": sorted(arrays),
        "types": {field: kind.value for field, kind in dataset.field2type.items()},
        "sources": {
            field: [isinstance(source, FeatureSource), getattr(source, "value", source)]
            for field, source in dataset.field2source.items()
        },
        "alias": {name: list(fields) for name, fields in dataset.alias.items()},
        "rest": list(dataset._rest_fields),
        "tokens": tokens,
        "summary": split.summary,
    }
    return arrays, state


def restore(dataset: Any, arrays: dict[str, np.ndarray], state: dict[str, Any]) -> None:
    """Set the state of a dataset, before it has read its files, to one of :func:`capture`.

    Args:
        dataset: the dataset, which is changed only if the state is valid.
        arrays, state: results of ``capture``.

    Raises:
        Exception: of any kind, if they are not.
    """
    tables = state["feat_name_list"][1:]
    _require(state["arrays"] == sorted(arrays), state["feat_name_list"][0] == "inter_feat")
    for names in (state["rest"], *state["alias"].values(), tables):
        _require(isinstance(names, list), all(isinstance(name, str) for name in names))
    sizes = {**state["field2seqlen"], **state["field2bucketnum"]}.values()
    _require(all(type(size) is int for size in sizes))
    groups: dict[str, dict[str, Any]] = {"log": {}, "missing": {}, "weight": {}, "tokens": {}}
    groups |= {name: {} for name in tables}
    for key, array in arrays.items():
        group, slash, name = key.partition("/")
        if slash:
            is_column = group == "log" or group in tables
            groups[group][name] = torch.from_numpy(array) if is_column else array
    ids = {
        f"tokens/{field}": {name: i for i, name in enumerate(names.tolist())}
        for field, names in groups["tokens"].items()
    }
    fields = (dataset.uid_field, dataset.iid_field, dataset.time_field)
    log = EventLog(groups["log"], arrays["offsets"], *fields)
    values = {
        **{name: state[name] for name in _PLAIN},
        "field2type": {field: FeatureType(kind) for field, kind in state["types"].items()},
        "field2source": {
            field: FeatureSource(source) if is_known else source
            for field, (is_known, source) in state["sources"].items()
        },
        "alias": {name: np.array(fields) for name, fields in state["alias"].items()},
        "_rest_fields": np.array(state["rest"]),
        "field2id_token": {field: arrays[key] for field, key in state["tokens"].items()},
        "field2token_id": {field: ids[key] for field, key in state["tokens"].items()},
        "missing": groups["missing"],
        "_preloaded_weight": groups["weight"],
        "events_of_users": arrays["events_of_users"],
        "split": Split(log, arrays["part"], arrays["is_target"], state["summary"]),
        **{"user_feat": None, "item_feat": None},
        **{name: Interaction(groups[name]) for name in tables},
    }
    _require_possible(values, {name: groups[name] for name in tables})
    for name, value in values.items():
        setattr(dataset, name, value)


def _require_possible(values: dict[str, Any], tables: Mapping[str, Any]) -> None:
    """Require that values lie within their ranges, and arrays have the lengths that others need.

    Raises:
        Exception: of any kind, if not.
    """
    split, tokens = values["split"], values["field2id_token"]
    log, part, is_target = split.log, split.part, split.is_target
    users, items = (len(tokens[field]) for field in (log.user_field, log.item_field))
    events, offsets, lengths = len(log.items), log.offsets, log.lengths
    for array, kind, shape in (
        (offsets, np.int64, users + 1),
        (part, np.int8, events),
        (is_target, np.bool_, events),
        (values["events_of_users"], np.int64, users),
    ):
        _require(array.dtype == kind, array.shape == (shape,))
    _require(offsets[0] == 0, offsets[-1] == events > 0, (lengths >= 0).all(), lengths[0] == 0)
    active, column = np.flatnonzero(lengths), log.users.numpy()  # users with events
    begins = offsets[active]
    _require(np.array_equal(column[begins], active), (column[1:] >= column[:-1]).all())
    _require(np.array_equal(column[offsets[active + 1] - 1], active))
    _require(log.times.dtype == torch.float64, log.items.dtype == torch.int64, log.items.min() > 0)
    falls = np.flatnonzero(np.diff(part) < 0) + 1  # parts may fall only from user to user
    _require(part.min() >= TRAIN, part.max() <= TEST, np.isin(falls, begins).all())
    _require(not is_target[begins].any(), (values["events_of_users"] >= lengths).all())
    sizes = {"user_feat": users, "item_feat": items, "inter_feat": events}
    for name, columns in {"inter_feat": log.fields, **tables}.items():
        for field, column in columns.items():
            kind = values["field2type"][field].value
            # a float field in buckets has two columns
            is_wide = kind.endswith("seq") or values["field2bucketnum"].get(field, 2) > 2
            _require(column.dim() == 1 + is_wide, len(column) == sizes.get(name, len(column)))
            if field in tokens:
                low, high = column.aminmax() if column.numel() else (0, 0)
                _require(column.dtype == torch.int64, 0 <= low, high < len(tokens[field]))
            else:
                _require(column.dtype.is_floating_point, column.isfinite().all())
    for mask in values["missing"].values():
        _require(mask.dtype == np.bool_, mask.shape in ((events,), (users,), (items,)))
    for field, weight in values["_preloaded_weight"].items():
        _require(weight.dtype.kind == "f", len(weight) == len(tokens[field]))
    for names in tokens.values():
        _require(names.dtype.kind == "U", names.ndim == 1, names[0] == "[PAD]")
    describe(split.summary)  # raises if a key that it reads is missing
    identity, ids = values["identity"], {log.user_field, log.item_field, log.time_field}
    digests = [identity["data"], *identity["fields"].values()]
    _require(all(isinstance(text, str) for text in digests))
    feats = (log.fields, *(tables.get(name, {}) for name in sizes))
    _require(set(identity["fields"]) == set().union(*feats) - ids)


def _require(*conditions: Any) -> None:
    if not all(conditions):
        raise ValueError("not what was kept")
