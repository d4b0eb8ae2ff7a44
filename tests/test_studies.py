"""The studies of this repository: every one can be planned, and every row of it be configured."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from recbole_pos.study.configs import check_plan, make_row_config
from recbole_pos.study.study_file import read_plan

ROOT = Path(__file__).parent.parent
STUDIES = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "studies").rglob("*.yaml"))


@pytest.fixture(autouse=True)
def _at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("study", STUDIES)
def test_every_row_of_a_study_can_be_configured(study: str, tmp_path: Path) -> None:
    """Options, presets and models know each other; data are not read."""
    plan = read_plan(study)
    assert plan.title and plan.question and plan.protocol
    assert {row for table in plan.tables for row in table.rows} == set(plan.rows)
    elsewhere = {} if plan.dataset == "ml-100k" else {"data_path": str(tmp_path)}
    found = check_plan(plan, lambda options: make_row_config(options, elsewhere).plain)
    measured = {f"{m}@{k}".lower() for c in found.values() for m in c["metrics"] for k in c["topk"]}
    assert set(plan.metrics) <= measured
    learn = [one for one in found.values() if one["epochs"] > 1]
    for key in ("eval_args", "metrics", "topk", "valid_metric", "epochs", "stopping_step"):
        assert len({str(one[key]) for one in learn}) == 1, f"{key} differs between rows"
    commands = re.findall(r"^#   recbole-pos compare (.*)$", Path(study).read_text(), re.M)
    assert commands and all(shlex.split(command)[0] == study for command in commands)


def test_the_sixteenth_has_the_rows_of_the_whole() -> None:
    whole = read_plan("studies/posrec/diginetica.yaml")
    part = read_plan("studies/posrec/diginetica-sixteenth.yaml")
    assert part.rows.keys() == whole.rows.keys() and not part.paper
    assert [row.options for row in part.rows.values()] == [r.options for r in whole.rows.values()]
    assert part.base.options == {**whole.base.options, "train_fraction": "1/16"}
    assert part.tables == whole.tables


def test_the_rhythm_of_the_generated_logs(tmp_path: Path) -> None:
    """The item of one period ago comes back far more often than that of the event before."""
    script = ROOT / "studies" / "to_rope" / "make_rhythm.py"
    subprocess.run([sys.executable, script, tmp_path], check=True, capture_output=True)
    for name, slot, period in (("weekly", 6 * 3600, 28), ("bursts", 300, 12)):
        log = pd.read_csv(tmp_path / name / f"{name}.inter", sep="\t")
        log.columns = [column.partition(":")[0] for column in log.columns]
        assert log["user_id"].nunique() == 1000 and log["item_id"].nunique() == 400
        ends = log.groupby("user_id")["timestamp"].transform("max")
        log["slot"] = (log["timestamp"] - 1_600_000_000) // slot
        recent = log[ends - log["timestamp"] < 3 * period * slot]
        again = recent.assign(slot=recent["slot"] + period)
        pairs = recent.merge(again, on=["user_id", "slot"], suffixes=("", "_before"))
        assert len(pairs) > 5000
        same = pairs["item_id"] == pairs["item_id_before"]
        assert same.mean() > (0.99 if name == "weekly" else 0.5)
        before = log.groupby("user_id")["item_id"].shift()
        assert (log["item_id"] == before).mean() < 0.05
