"""A study of a few seconds, which its test files train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recbole_pos.study.plan import Plan
from recbole_pos.study.reading import make_plan
from recbole_pos.study.results import DONE
from recbole_pos.study.source import Source
from recbole_pos.study.study_folder import StudyFolder
from recbole_pos.study.work import Job

SMALL = {"hidden_size": 8, "inner_size": 8, "MAX_ITEM_LIST_LENGTH": 8, "epochs": 2}
BASE = {**SMALL, "model": "PosSASRec", "n_layers": 1, "train_batch_size": 16}


def study(tiny: Path, **more: Any) -> dict[str, Any]:
    """Two rows and two seeds; more keys of a study win."""
    return {
        "dataset": "tiny",
        "title": "A study",
        "base": {**BASE, "data_path": str(tiny)},
        "rows": {"NoPE": {"position": ["nope"]}, "Learned": {"position": ["learned"]}},
        "seeds": 2,
        **more,
    }


def plan(tiny: Path, **more: Any) -> Plan:
    """The plan of such a study."""
    return make_plan(Source("study", study(tiny, **more)))


def finish(folder: StudyFolder, job: Job, value: float = 0.1) -> None:
    """As if it had been trained."""
    metrics = {"best_valid": {"ndcg@10": value}}
    folder.write_fit(job.digest, {"status": DONE, "row": job.fit.row, **metrics})
    folder.run(job.digest).write_config(job.config.plain)
    folder.run(job.digest).checkpoint.touch()
