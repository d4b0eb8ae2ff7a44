"""No damage to a checkpoint ends a resume in anything but a refusal that names the damage."""

from __future__ import annotations

import collections
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SMALL
from damage import ACCEPTED, KINDS
from damage import __file__ as script

import recbole_pos

CASES = 500


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["FPARec", "ItemKNN"])
def test_every_damage_is_refused_or_harmless(
    tiny: Path, tmp_path: Path, request, record_property, model: str, kind: str
) -> None:
    options = {**SMALL, "data_path": str(tiny)}
    if model == "ItemKNN":  # which keeps sparse matrices, and trains nothing
        options = {"data_path": str(tiny), "show_progress": False, "k": 5}
    run = tmp_path / "run"
    recbole_pos.run(model, "tiny", None, options, run_dir=run, verbose=False)
    cases = CASES if request.config.getoption("--fuzz") else 12
    command = [sys.executable, script, str(run), kind, "0", str(cases)]
    tried = subprocess.run(command, capture_output=True, text=True)
    lines = tried.stdout.splitlines()
    outcomes = collections.Counter()
    for line in lines:
        case, end = json.JSONDecoder().raw_decode(line)
        rest = line[end:].strip()
        assert rest, f"{case} ended the process: {tried.returncode}, {tried.stderr[-2000:]}"
        outcome = json.loads(rest)["outcome"]
        kept = outcome == ACCEPTED or outcome.startswith(("CheckpointError: ", "UsageError: "))
        assert kept, f"{case}: {outcome}"
        outcomes[outcome.split(":")[0]] += 1
    assert outcomes.total() == cases, tried.stderr[-2000:]
    counts = ", ".join(f"{n} {name}" for name, n in outcomes.most_common())
    record_property("fuzz", f"{model}, {cases} checkpoints, {kind}: {counts}")
