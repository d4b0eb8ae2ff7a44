"""Session data as the papers have them: their presets build."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import write_atomic
from session_logs import session_log

from recbole_pos.config import PosConfig
from recbole_pos.quick_start import prepare


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
