"""From folders of runs to the results of a study, and from these to its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from recbole_pos.errors import UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.folder import RunFolder, make_folder
from recbole_pos.experiment.result import KNOWS_WHEN, read_result
from recbole_pos.files import atomic_write, write_text
from recbole_pos.runs.worker import QUIET
from recbole_pos.study.configs import require_twins
from recbole_pos.study.plan import Plan, list_fits
from recbole_pos.study.ranks import RankTable, require_metrics
from recbole_pos.study.result_tables import render_markdown, tabulate
from recbole_pos.study.results import (
    DONE,
    FAILED,
    VALIDATION,
    Comparison,
    Results,
    TieCount,
    compare,
)
from recbole_pos.study.scheduler import average_seeds
from recbole_pos.study.study_file import make_plan
from recbole_pos.study.study_folder import (
    KNOWN_FROM,
    StudyFolder,
    read_curve,
    read_facts,
)
from recbole_pos.study.study_report import render_report
from recbole_pos.study.study_source import Source
from recbole_pos.values import escape_formula, short
from recbole_pos.yaml_files import read_yaml

_DECIMALS = 6  # default of metric_decimal_place
# Options that runs must share, to be compared without a plan.
_SAME = (
    "dataset",
    "eval_args",
    "mask_history",
    "train_fraction",
    "session_filter",
    "target_events",
)
# Options in which runs may differ without a word in their names.
_UNNAMED = {*QUIET, "seed", "data_path", "gpu_id", "init_from", "update_from"}


class _Collector:
    """Runs of a study as lines and ranks, whose order is that of rows and of seeds.

    Args:
        metric: validation metric of the curves.
        root: folder to which paths are relative.
    """

    def __init__(self, metric: str, root: Path) -> None:
        self.metric, self.root = metric, root
        self.lines: list[dict[str, Any]] = []
        self.ranks: dict[tuple[str, int], pd.DataFrame] = {}
        self.curves: list[dict[str, Any]] = []

    def add(self, facts: dict[str, Any], run: RunFolder, trained: bool = True) -> None:
        """Add a run by its facts; one that was only tested has no cost and no curve."""
        row, seed, path = facts["row"], facts["seed"], run.path
        best_valid = (facts.get("best_valid") or {}).get(self.metric)
        seconds = (facts.get("seconds") or {}).get("training")
        line = {
            **{key: facts.get(key, "") for key in ("row", "seed", "status", "reason")},
            **(facts.get("test") or {}),
            VALIDATION: best_valid if trained else None,
            "seconds": seconds if trained else None,
            "parameters": facts.get("parameters"),
            "epochs": facts.get("epochs") if trained else None,
            "device": _describe_device(facts.get("device") or {}),
            **{key: facts.get(key, "") for key in ("commit", "digest", KNOWN_FROM)},
            "request_time": facts.get("request_time", "none"),
            "path": str(path.relative_to(self.root) if path.is_relative_to(self.root) else path),
        }
        self.lines.append(line)
        if facts["status"] == DONE and run.ranks.is_file():
            self.ranks[row, seed] = _read_ranks(facts, run)
        for epoch, value in read_curve(run, self.metric).items() if trained else ():
            self.curves.append({"row": row, "seed": seed, "epoch": epoch, "value": value})

    def results(self, plan: Plan, facts: Mapping[str, Any], **others: Any) -> Results:
        """Return the results of the runs, with the facts of the study, its searches and command."""
        places = {row: place for place, row in enumerate(plan.rows)}
        self.lines.sort(key=lambda line: (places[line["row"]], line["seed"]))
        ranks = sorted(self.ranks.items(), key=lambda item: (places[item[0][0]], item[0][1]))
        # a warning beside metrics of models that know the time of their target
        know = [line["row"] for line in self.lines if line.get("request_time") == "target"]
        knowing = [f"{', '.join(dict.fromkeys(know))}: {KNOWS_WHEN}"] if know else []
        none = pd.DataFrame(columns=["row", "seed", "status"])
        ties = facts.get("ties")
        return Results(
            plan=plan,
            runs=pd.DataFrame(self.lines) if self.lines else none,
            ranks=RankTable.from_runs(dict(ranks)) if ranks else None,
            curves=pd.DataFrame(self.curves),
            ties=TieCount(ties["users"], ties["test"]) if ties else None,
            warnings=(*facts.get("warnings", ()), *knowing),
            data=facts.get("data", {}),
            versions=facts.get("versions", {}),
            **others,
        )


def collect_results(plan: Plan, folder: StudyFolder) -> Results:
    """Return the results of a study so far, from its runs; a UsageError names a damaged file."""
    collector = _Collector(plan.metrics[0], folder.path)
    facts, current = folder.facts(), folder.current(plan)
    chosen, chosen_by, unmade = (facts.get(key, {}) for key in ("chosen", "chosen_by", "unmade"))
    trials: dict[tuple[str, int], dict[str, Any]] = {}
    versions: dict[str, dict[str, None]] = {}  # package -> versions that runs were made with
    for fit in list_fits(plan):
        digest = current.get(fit.name, "")
        run_facts = {"status": "", **folder.fit(digest), "row": fit.row, "seed": fit.seed}
        metric = chosen_by.get(fit.row, plan.metrics[0])
        if "digest" not in run_facts:
            if fit.name in unmade and fit.trial is None:
                failed = {"status": FAILED, "reason": unmade[fit.name], "path": ""}
                collector.lines.append({"row": fit.row, "seed": fit.seed, **failed})
        elif fit.trial is not None:
            options = (run_facts.get("searched") or {}).items()
            line = {"row": fit.row, "trial": fit.trial, "metric": metric, "value": []}
            line["options"] = ", ".join(f"{name}: {option}" for name, option in options)
            line["chosen"] = chosen.get(fit.row) == fit.trial
            values = trials.setdefault((fit.row, fit.trial), line)["value"]
            values.append((run_facts.get("best_valid") or {}).get(metric))
        else:
            collector.add(run_facts, folder.run(digest), trained=fit.stage != "retest")
            for name, version in (run_facts.get("versions") or {}).items():
                versions.setdefault(name, {})[version] = None
    for line in trials.values():
        line["value"] = average_seeds(line["value"], len(plan.tried_with))
    searches = pd.DataFrame(list(trials.values()))
    if trials:
        searches = searches.sort_values(["row", "trial"], ignore_index=True)
        searches["value"] = searches["value"].astype(float)
    if versions:
        facts["versions"] = {name: ", ".join(found) for name, found in versions.items()}
    command = f"recbole-pos compare {folder.path}"
    return collector.results(plan, facts, searches=searches, command=command)


def _describe_device(device: Mapping[str, Any]) -> str:
    """Return ``cpu (AMD EPYC, AVX512), 1 thread, float32``; older runs have no processor."""
    if not device:
        return ""
    processor = f" ({device['processor']})" if device.get("processor") else ""
    threads = f"{device['threads']} thread{'s' * (device['threads'] != 1)}"
    return f"{device['name']}{processor}, {threads}, {device['precision']}"


def _read_ranks(facts: dict[str, Any], run: RunFolder) -> pd.DataFrame:
    """Return the ranks of a run's targets; a UsageError if damaged, or the metrics do not agree."""
    name, test = str(run.ranks), facts.get("test") or {}
    try:
        frame = pd.read_parquet(run.ranks)
        rank = frame["rank"].to_numpy(dtype=float)
    except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
        advice = f"delete {run.path}, and make the run again"
        raise UsageError(f"{name} is damaged: {short(str(error))}; {advice}") from error
    try:
        require_metrics(test, rank, _DECIMALS, name)
    except UsageError:  # unless the configuration rounds more
        require_metrics(test, rank, int(read_yaml(run.config)["metric_decimal_place"]), name)
    return frame


def collect_runs(paths: Sequence[Path], reference: str | None = None) -> Results:
    """Return the results of runs that exist already, of the same data and split.

    Args:
        paths: folders of the runs.
        reference: name of the row that others are compared to; the first if None.

    Raises:
        UsageError: naming a run that is not finished, or two of different data or splits.
    """
    configs = [_require_finished(path) for path in paths]
    names = _names(configs)
    require_twins(dict(zip(names, configs, strict=True)))
    collector = _Collector(str(configs[0].get("valid_metric", "ndcg@10")).lower(), Path())
    rows: dict[str, dict[str, Any]] = {}
    events = [checkpoint.load(RunFolder(path).checkpoint, ("data",))["data"] for path in paths]
    for place, (path, config, name) in enumerate(zip(paths, configs, names, strict=True)):
        keys = [key for key in _SAME if config.get(key) != configs[0].get(key)]
        if (events[place] or "")[:32] != (events[0] or "")[:32]:
            keys.append("the interactions, or what is held out of them,")
        if keys:
            raise UsageError(
                f"compare: {path} and {paths[0]} cannot be compared: {keys[0]} is not the same: "
                f"{config.get(keys[0])} and {configs[0].get(keys[0])}"
            )
        if (name, config["seed"]) in collector.ranks:
            raise UsageError(
                f"compare: {path} is a run of {name} with a seed that is there already"
            )
        run = RunFolder(path)
        status = {"row": name, "seed": config["seed"], "status": DONE}
        collector.add({**asdict(read_result(run)), **status}, run)
        content = {key: config[key] for key in ("item_vectors",) if config.get(key)}
        rows[name] = {"model": config["model"], **content}
    dataset = str(configs[0]["dataset"])
    study = {"dataset": dataset, "title": f"{len(paths)} runs on {dataset}", "rows": rows}
    study["seeds"] = sorted({config["seed"] for config in configs})
    study |= {"reference": reference} if reference else {}
    first = read_result(RunFolder(paths[0]))  # all have the same data
    warnings = [text for text in first.warnings if text != KNOWS_WHEN]
    return collector.results(
        make_plan(Source("command line", study)),
        {"versions": first.versions, "warnings": warnings},
        command=f"recbole-pos compare {' '.join(map(str, paths))}",
    )


def _require_finished(path: Path) -> dict[str, Any]:
    """Return the configuration of a run; a UsageError without weights, ranks and result."""
    if source := read_facts(RunFolder(path)).get(KNOWN_FROM):
        raise UsageError(
            f"compare: {path} was taken from {source}, without weights; give that file to its "
            "study, `compare STUDY --known`"
        )
    run = RunFolder(path).require()
    for file in (run.result, run.ranks):
        if not file.is_file():
            raise UsageError(
                f"compare: {path} has no {file.name}; `recbole-pos run --resume {path}` finishes "
                "the run and writes it"
            )
    return read_yaml(run.config)


def _names(configs: list[dict[str, Any]]) -> list[str]:
    """Return names of runs as rows: the model, and the options in which its runs differ."""
    names = []
    for config in configs:
        alike = [other for other in configs if other["model"] == config["model"]]
        differing = ", ".join(
            f"{key}: {config[key]}"
            for key in config
            if key not in _UNNAMED and any(other.get(key) != config[key] for other in alike)
        )
        names.append(config["model"] + f" ({differing})" * bool(differing))
    return names


def write_results(results: Results, folder: Path) -> tuple[list[Comparison], list[Path]]:
    """Write table.md, table.csv, runs.csv, runs.parquet and report.html into a folder.

    Returns:
        The numbers of the tables of the plan, and the paths of the files.
    """
    make_folder(folder)
    comparisons = [compare(results, table) for table in results.plan.tables]
    texts = {
        "table.md": render_markdown(results, comparisons),
        "table.csv": _csv(tabulate(comparisons)),
        "runs.csv": _csv(results.runs),
        "report.html": render_report(results, comparisons),
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    with atomic_write(folder / "runs.parquet", text=False) as file:
        results.runs.to_parquet(file, index=False)
    return comparisons, [folder / name for name in (*texts, "runs.parquet")]


def _csv(frame: pd.DataFrame) -> str:
    """Return a table as text for spreadsheets: no cell begins as a formula does."""
    return frame.apply(lambda column: column.map(escape_formula)).to_csv(index=False)
