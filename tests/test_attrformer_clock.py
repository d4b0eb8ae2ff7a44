"""AttrFormer asks for a clock wherever it compares the times of different users."""

from __future__ import annotations

from pathlib import Path

import pytest
from shop import open_shop, tables, write

from recbole_pos.errors import UsageError

UNTIMED = {"relations": ["brand"], "position": ["nope"]}


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({"cross_sequence": "time_respecting"}, True),
        ({"cross_sequence": "random_order"}, False),
        ({"cross_sequence": "none", "relations": ["brand", "time"]}, True),
    ],
    ids=str,
)
def test_times_that_number_events_are_no_clock(tmp_path: Path, options: dict, warned: bool) -> None:
    made = tables()
    place = made["inter"].groupby("user_id:token").cumcount()
    made["inter"]["timestamp:float"] = place.astype(float)
    notices = open_shop(write(tmp_path, made), **{**UNTIMED, **options}).model.notices
    assert any("looks like a running number" in notice for notice in notices) == warned


def test_times_that_stand_still_are_no_clock(tmp_path: Path) -> None:
    made = tables()
    made["inter"]["timestamp:float"] = 5.0
    folder = write(tmp_path, made)
    open_shop(folder, **UNTIMED)
    with pytest.raises(UsageError, match="all events of a user.* or set cross_sequence: random_o"):
        open_shop(folder, **UNTIMED, cross_sequence="time_respecting")
    with pytest.raises(UsageError, match="all events of a user.* or leave the time out of rel"):
        open_shop(folder, **{**UNTIMED, "relations": ["brand", "time"]})


def test_one_time_a_user_is_enough_across_users(tmp_path: Path) -> None:
    """Sessions with the time of their day alone have an order among them."""
    made = tables()
    first = made["inter"].groupby("user_id:token")["timestamp:float"].transform("min")
    made["inter"]["timestamp:float"] = first
    folder = write(tmp_path, made)
    open_shop(folder, **UNTIMED, cross_sequence="time_respecting")
    with pytest.raises(UsageError, match="or leave the time out of relations$"):
        open_shop(folder, position=["nope"], relations=["time"], cross_sequence="time_respecting")
