"""A study of a few seconds, which its test files train, and one whose runs look as if trained."""

from pathlib import Path
from typing import Any

from recbole_pos.runs import DONE, FAILED
from recbole_pos.study.dispatcher import write_state
from recbole_pos.study.plan import Plan, Source
from recbole_pos.study.scheduler import Scheduler
from recbole_pos.study.study_file import make_plan

SMALL = {"hidden_size": 8, "inner_size": 8, "MAX_ITEM_LIST_LENGTH": 8, "epochs": 2}
BASE = {**SMALL, "model": "PosSASRec", "n_layers": 1, "train_batch_size": 16}
NOPE = {"NoPE": {"position": ["nope"]}}
ROWS = {**NOPE, "Learned": {"position": ["learned"]}}


def study(tiny: Path, **more: Any) -> dict[str, Any]:
    base = {**BASE, "data_path": str(tiny)}
    content = {"dataset": "tiny", "title": "A study", "base": base, "rows": ROWS, "seeds": 2}
    return {**content, **more}


def plan(tiny: Path, **more: Any) -> Plan:
    return make_plan(Source("study", study(tiny, **more)))


def train(
    made: Scheduler, values: dict[Any, float | None] | None = None, fits: int = 1000
) -> list[str]:
    """As if so many fits were trained, and then a report were asked for.

    Args:
        made: the fits.
        values: (trial, seed) -> NDCG@10 in validation, None for one that fails; 0.1 for others.
            MRR@10 is the lower, the higher that is.
        fits: how many.

    Returns:
        Names of the fits, with * for those that were only tested.
    """
    folder, names = made.folder, []
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write_plan(made.plan)
    while len(names) < fits and (job := made.next_job()):
        names.append(job.fit.name + " *" * (job.tested_run is not None))
        value = (values or {}).get((job.fit.trial, job.fit.seed), 0.1)
        status = FAILED if value is None else DONE
        valid = {"ndcg@10": value or 0.0, "mrr@10": 1 - (value or 0.0)}
        facts = {"status": status, "best_valid": valid}
        folder.write_fit(job.digest, {**facts, **made.describe(job.fit)})
        folder.run(job.digest).write_metrics([{"epoch": 0, "valid": valid}])
        folder.run(job.digest).write_config(job.config.plain)
        folder.run(job.digest).checkpoint.touch()
        made.end(job.fit, status, "" if value else "it diverged", folder.read_fit(job.digest))
    write_state(made)
    return names
