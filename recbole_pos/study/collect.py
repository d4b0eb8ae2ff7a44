"""From folders of runs to the results of a study, and from these to its files."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from recbole_pos.config.checks import as_list
from recbole_pos.config.posconfig import PLUGINS, STARTS
from recbole_pos.data.targets import warn_of_repeats
from recbole_pos.errors import UsageError, make_resume_command
from recbole_pos.experiment.folder import KNOWS_WHEN, RunFolder, make_folder, read_result
from recbole_pos.files import atomic_write, write_text
from recbole_pos.runs import DONE, FAILED
from recbole_pos.study.configs import require_same_candidates, require_twins
from recbole_pos.study.digests import INDIFFERENT
from recbole_pos.study.plan import METRICS, Plan, list_fits
from recbole_pos.study.ranks import RankTable, is_from_ranks
from recbole_pos.study.result_tables import render_markdown, tabulate
from recbole_pos.study.results import RUN_FOLDERS, VALIDATION, Results, select_protocol
from recbole_pos.study.scheduler import average_seeds
from recbole_pos.study.study_file import make_plan
from recbole_pos.study.study_folder import (
    KNOWN_FROM,
    StudyFacts,
    StudyFolder,
    read_curve,
)
from recbole_pos.study.study_report import render_report
from recbole_pos.study.study_source import Source
from recbole_pos.values import escape_formula
from recbole_pos.yaml_files import read_yaml

_VERSIONED = ("torch", "recbole", "recbole_pos")  # packages whose versions a table must not mix
# Options that runs must share, to be compared without a plan.
_SHARED = (
    *("dataset", "eval_args"),
    *("train_fraction", "session_filter", "target_events"),
)
# Options that are not in the name of a row, although its runs differ in them.
_UNNAMED = {*INDIFFERENT, "seed"}


class _Collector:
    """Collects lines, ranks and curves of runs; paths in lines are relative to ``root``."""

    def __init__(self, metric: str, root: Path) -> None:
        self.metric, self.root = metric, root
        self.lines: list[dict[str, Any]] = []
        self.ranks: dict[tuple[str, int], pd.DataFrame] = {}
        self.curves: list[dict[str, Any]] = []
        # package -> version -> rows with a run of it
        self.rows_by_version: dict[str, dict[str, list[str]]] = {name: {} for name in _VERSIONED}

    def add(self, facts: Mapping[str, Any], run: RunFolder, is_trained: bool = True) -> None:
        """Add a run and its facts; a run that was only tested has no cost and no curve."""
        row, seed, path = facts["row"], facts["seed"], run.path
        best_valid = (facts.get("best_valid") or {}).get(self.metric)
        seconds = (facts.get("seconds") or {}).get("training")
        line = {
            **{key: facts.get(key, "") for key in ("row", "seed", "status", "reason")},
            **(facts.get("test") or {}),
            VALIDATION: best_valid if is_trained else None,
            "seconds": seconds if is_trained else None,
            "parameters": facts.get("parameters"),
            "epochs": facts.get("epochs") if is_trained else None,
            "candidates": facts.get("candidates", ""),
            "device": _describe_device(facts.get("device") or {}),
            **{key: facts.get(key, "") for key in ("commit", "digest", KNOWN_FROM)},
            "request_time": facts.get("request_time", "none"),
            "path": str(path.relative_to(self.root) if path.is_relative_to(self.root) else path),
        }
        self.lines.append(line)
        for package, rows in self.rows_by_version.items():
            if version := (facts.get("versions") or {}).get(package):
                rows.setdefault(version, []).append(row)
        if facts["status"] == DONE and run.ranks.is_file():
            self.ranks[row, seed] = pd.read_parquet(run.ranks)
        if is_trained:
            for epoch, value in read_curve(run, self.metric).items():
                self.curves.append({"row": row, "seed": seed, "epoch": epoch, "value": value})

    def make_results(
        self, plan: Plan, facts: StudyFacts, command: str, searches: pd.DataFrame | None = None
    ) -> Results:
        """Return the results of the runs in the order of rows and seeds."""
        row_order = {row: index for index, row in enumerate(plan.rows)}
        lines = sorted(self.lines, key=lambda line: (row_order[line["row"]], line["seed"]))
        ranked_runs = sorted(self.ranks, key=lambda run: (row_order[run[0]], run[1]))
        ranks = {run: self.ranks[run] for run in ranked_runs}
        warnings = list(facts.warnings)
        time_aware_rows = [line["row"] for line in lines if line.get("request_time") == "target"]
        if time_aware_rows:
            warnings.append(f"{', '.join(dict.fromkeys(time_aware_rows))}: {KNOWS_WHEN}")
        for candidates in sorted(
            {str(line["candidates"]) for line in lines if line.get("candidates")}
        ):
            if facts.split:
                warnings += warn_of_repeats(facts.split, candidates)
        for package, by_version in self.rows_by_version.items():
            if len(by_version) > 1:
                parts = [
                    f"{v} ({', '.join(dict.fromkeys(by_version[v]))})" for v in sorted(by_version)
                ]
                warnings.append(
                    f"runs were made with different versions of {package}: {', '.join(parts)}; "
                    "differences between them may come from that"
                )
        return Results(
            plan=plan,
            runs=pd.DataFrame(lines or {"row": [], "seed": [], "status": []}),
            ranks=RankTable.from_runs(ranks) if ranks else None,
            curves=pd.DataFrame(self.curves),
            searches=pd.DataFrame() if searches is None else searches,
            command=command,
            split=facts.split,
            warnings=tuple(dict.fromkeys(warnings)),
            data=facts.data,
            versions=facts.versions,
        )


def collect_results(plan: Plan, folder: StudyFolder) -> Results:
    """Return the results of a study so far, from its runs; a UsageError names a damaged file."""
    collector = _Collector(plan.metrics[0], folder.path)
    facts = folder.read_facts()
    digests = folder.find_current_digests(plan)
    trials: dict[tuple[str, int], list[dict[str, Any]]] = {}
    versions: dict[str, list[str]] = {}  # package -> versions that runs were made with
    for fit in list_fits(plan):
        digest = digests.get(fit.name, "")
        run_facts = folder.read_fit(digest)
        identity = {"row": fit.row, "seed": fit.seed}
        if "digest" not in run_facts:  # the run has no folder
            if fit.name in facts.unmade and fit.trial is None:
                failure = {"status": FAILED, "reason": facts.unmade[fit.name], "path": ""}
                collector.lines.append({**identity, **failure})
        elif fit.trial is not None:
            trials.setdefault((fit.row, fit.trial), []).append(run_facts)
        else:
            run_facts = {"status": "", **run_facts, **identity}
            collector.add(run_facts, folder.run(digest), is_trained=fit.stage != "retest")
            for name, version in (run_facts.get("versions") or {}).items():
                versions.setdefault(name, []).append(version)
    if versions:
        facts.versions = {name: ", ".join(dict.fromkeys(used)) for name, used in versions.items()}
    searches = _tabulate_trials(plan, facts, trials)
    plugins = [str(name) for name in as_list(plan.base.options.get(PLUGINS) or [])]
    command = make_resume_command(folder.path, plugins, "compare")
    return collector.make_results(plan, facts, command, searches)


def _tabulate_trials(
    plan: Plan, facts: StudyFacts, trials: Mapping[tuple[str, int], list[dict[str, Any]]]
) -> pd.DataFrame:
    """Return a line for each trial, given row and trial -> facts of its run with each seed."""
    lines = []
    for (row, trial), runs in sorted(trials.items()):
        metric = facts.chosen_by.get(row, plan.metrics[0])
        values = [(run.get("best_valid") or {}).get(metric) for run in runs]
        options = runs[0].get("searched") or {}
        lines.append(
            {
                "row": row,
                "trial": trial,
                "metric": metric,
                "value": average_seeds(values, len(plan.trial_seeds)),
                "options": ", ".join(f"{name}: {value}" for name, value in options.items()),
                "chosen": facts.chosen.get(row) == trial,
            }
        )
    frame = pd.DataFrame(lines)
    return frame.astype({"value": float}) if lines else frame


def _describe_device(device: Mapping[str, Any]) -> str:
    """Return ``cpu (AMD EPYC, AVX512), 1 thread, float32``; empty for an unknown device."""
    if not device:
        return ""
    processor = f" ({device['processor']})" if device.get("processor") else ""
    threads = f"{device['threads']} thread{'s' * (device['threads'] != 1)}"
    return f"{device['name']}{processor}, {threads}, {device['precision']}"


def collect_runs(paths: Sequence[Path], reference: str | None = None) -> Results:
    """Return the results of runs in folders, which must be finished, of the same data and split.

    ``reference`` is the row that others are compared to; the first if None.

    Raises:
        UsageError: naming a run that is not finished, or two of different data or splits.
    """
    configs = [_read_finished_config(path) for path in paths]
    names = _name_rows(configs)
    results = [read_result(RunFolder(path)) for path in paths]
    require_twins(dict(zip(names, configs, strict=True)))
    require_same_candidates(
        {str(path): result.candidates for path, result in zip(paths, results, strict=True)}
    )
    metric = str(configs[0].get("valid_metric")).lower()
    metrics = list(dict.fromkeys([metric, *METRICS] if is_from_ranks(metric) else METRICS))
    collector = _Collector(metrics[0], Path())
    rows: dict[str, dict[str, Any]] = {}
    _require_same_data(paths, configs)
    for path, config, name, result in zip(paths, configs, names, results, strict=True):
        if (name, config["seed"]) in collector.ranks:
            raise UsageError(f"compare: {path} is a second run of {name} with one seed")
        identity = {"row": name, "seed": config["seed"], "status": DONE}
        collector.add({**asdict(result), **identity}, RunFolder(path))
        rows[name] = {"model": config["model"]}
        if config.get("item_vectors"):
            rows[name]["item_vectors"] = config["item_vectors"]
    dataset = str(configs[0]["dataset"])
    study = {"dataset": dataset, "title": f"{len(paths)} runs on {dataset}", "rows": rows}
    study["metrics"] = metrics
    study["seeds"] = sorted({config["seed"] for config in configs})
    if reference:
        study["reference"] = reference
    chosen = ["--reference", reference] if reference else []
    result = results[0]  # all runs have the same data
    warnings = [text for text in result.warnings if text != KNOWS_WHEN]
    return collector.make_results(
        make_plan(Source(RUN_FOLDERS, study)),
        StudyFacts(
            versions=result.versions, warnings=warnings, split=select_protocol(result.split)
        ),
        shlex.join(["recbole-pos", "compare", *map(str, paths), *chosen]),
    )


def _require_same_data(paths: Sequence[Path], configs: Sequence[Mapping[str, Any]]) -> None:
    """Raise a UsageError for a run whose data, split or protocol differ from the first run's."""
    for path, config in zip(paths, configs, strict=True):
        prefix = f"compare: {path} and {paths[0]} cannot be compared: "
        for key in _SHARED:
            if config.get(key) != configs[0].get(key):
                values = f"{config.get(key)} and {configs[0].get(key)}"
                raise UsageError(f"{prefix}{key} is not the same: {values}")


def _read_finished_config(path: Path) -> dict[str, Any]:
    """Return the configuration of a run; a UsageError if it has no weights, ranks or result."""
    run = RunFolder(path).require()
    for file in (run.result, run.ranks):
        if not file.is_file():
            raise UsageError(
                f"compare: {path} has no {file.name}; `{run.resume_command}` finishes "
                "the run and writes it"
            )
    return read_yaml(run.config)


def _name_rows(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a row name for each run: its model, and options in which the model's runs differ."""
    named = [{k: v for k, v in config.items() if k not in _UNNAMED} for config in configs]
    for config, options in zip(configs, named, strict=True):
        options |= {key: "a run" if config.get(key) else None for key in STARTS}
    names = []
    for options in named:
        same_model = [other for other in named if other["model"] == options["model"]]
        differing = [
            f"{key}: {value}"
            for key, value in options.items()
            if any(other.get(key) != value for other in same_model)
        ]
        names.append(options["model"] + (f" ({', '.join(differing)})" if differing else ""))
    return names


def write_results(results: Results, folder: Path) -> list[Path]:
    """Write table.md, table.csv, runs.csv, runs.parquet and report.html; return their paths."""
    make_folder(folder)
    texts = {
        "table.md": render_markdown(results),
        "table.csv": _to_csv(tabulate(results.comparisons)),
        "runs.csv": _to_csv(results.runs),
        "report.html": render_report(results),
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    with atomic_write(folder / "runs.parquet", text=False) as file:
        results.runs.to_parquet(file, index=False)
    return [folder / name for name in (*texts, "runs.parquet")]


def _to_csv(frame: pd.DataFrame) -> str:
    """Return a table as csv in which no cell begins as a formula of a spreadsheet does."""
    return frame.apply(lambda column: column.map(escape_formula)).to_csv(index=False)
