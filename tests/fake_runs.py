"""Studies whose runs look as if they had been trained."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from recbole_pos.study.plan import Plan
from recbole_pos.study.preview import preview
from recbole_pos.study.results import DONE
from recbole_pos.study.scheduler import Job, Scheduler
from recbole_pos.study.study_file import make_plan
from recbole_pos.study.study_folder import StudyFolder
from recbole_pos.study.study_source import Source

SMALL = {"hidden_size": 8, "inner_size": 8, "MAX_ITEM_LIST_LENGTH": 8, "epochs": 2, "n_layers": 1}


def plan(tiny: Path, **more: Any) -> Plan:
    rows = {
        "NoPE": {"position": ["nope"]},
        "RoPE": {"position": ["rope"]},
        "RoPE + kernel": {"attach": {"to": "RoPE", "schemes": ["kernel"]}},
    }
    base = {**SMALL, "model": "PosSASRec", "data_path": str(tiny)}
    content = {"dataset": "tiny", "title": "A study", "base": base, "rows": rows, "seeds": 2}
    return make_plan(Source("study", {**content, **more}))


def finish(folder: StudyFolder, job: Job, value: float = 0.1) -> None:
    """As if it had been trained."""
    metrics = {"best_valid": {"ndcg@10": value}}
    folder.write_fit(job.digest, {"status": DONE, "row": job.fit.row, **metrics})
    folder.run(job.digest).write_config(job.config.plain)
    folder.run(job.digest).checkpoint.touch()


def preview_text(made: Plan, folder: StudyFolder, rows: tuple[str, ...] = ()) -> str:
    """What a dry run prints."""
    lines, table = preview(Scheduler(made, folder, rows))
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return "\n".join([*lines, console.file.getvalue()])
