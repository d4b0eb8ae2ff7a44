"""Session data as the papers have them: one pass of filtering, presets that build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import write_atomic
from session_logs import session_log

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.dataset import PosSequentialDataset
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import prepare


@pytest.mark.parametrize("name", ["diginetica", "yoochoose"])
def test_the_presets_build_on_sessions(tmp_path: Path, name: str) -> None:
    """On data whose columns are those of the papers' files, but for the number of sessions."""
    frame = session_log().rename(columns={"user_id": "session_id"})
    given = {
        "data_path": str(write_atomic(frame, tmp_path)),
        "eval_args": {"split": {"ST": 100}},
    }
    made = prepare(PosConfig("PosRec", "tiny", [f"posrec/{name}.yaml"], given))
    assert made.dataset.split.summary["sessions"]["train"] == 100
    assert made.dataset.user_num == frame.session_id.nunique() + 1
    assert made.loaders["test"] and made.config["topk"] == [5, 10]


# c loses z and is short, so v is rare in the end; y is rare once d, of one event, is gone
EVENTS = {"a": "xw", "b": "xw", "c": "vz", "g": "vx", "d": "y", "h": "yx"}
CORE = {"user_inter_num_interval": "[2,inf)", "item_inter_num_interval": "[2,inf)"}


def filtered(folder: Path, **options: Any) -> PosSequentialDataset:
    rows = [(session, item) for session, items in EVENTS.items() for item in items]
    frame = pd.DataFrame(rows, columns=["user_id", "item_id"])
    write_atomic(frame.assign(timestamp=range(len(rows))), folder)
    item = pd.DataFrame({"item_id:token": list("vwxyzq"), "size:float": range(6)})
    item.to_csv(folder / "tiny" / "tiny.item", sep="\t", index=False)
    fields = {"inter": ["user_id", "item_id", "timestamp"], "item": ["item_id", "size"]}
    given = {"data_path": str(folder), "load_col": fields, **options}
    return PosSequentialDataset(PosConfig("SASRec", "tiny", None, given))


def left(dataset: PosSequentialDataset) -> dict[str, str]:
    """The items of each session."""
    users, items = (dataset.field2id_token[field] for field in ("user_id", "item_id"))
    found: dict[str, str] = {}
    for user, item in dataset.inter_feat[["user_id", "item_id"]].to_numpy():
        found[users[user]] = found.get(users[user], "") + items[item]
    return found


def test_one_pass_by_hand(tmp_path: Path) -> None:
    made = filtered(tmp_path, session_filter={"item": 2, "session": 2})
    assert left(made) == {"a": "xw", "b": "xw", "g": "vx"}
    # q never had an event, which is RecBole's to keep; what was dropped has no id and no row
    assert set(made.field2id_token["item_id"][1:]) == set("xwvq") and made.user_num == 4
    assert left(filtered(tmp_path, **CORE)) == {"a": "xw", "b": "xw"}
    assert left(filtered(tmp_path)) == EVENTS
    assert left(filtered(tmp_path, session_filter={"session": 2})) == {
        session: items for session, items in EVENTS.items() if session != "d"
    }


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *((v, "^session_filter: expected") for v in (5, [5, 2], {"items": 5}, {"item": 0})),
        *((v, "^session_filter: expected") for v in ({"item": True}, {"session": 2.5})),
        ({"item": 9}, "See session_filter"),
    ],
    ids=str,
)
def test_wrong_filters(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        filtered(tmp_path, session_filter=value)
