"""From folders of runs to the results of a study, and from these to its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from recbole_pos.errors import UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.folder import RunFolder, make_folder
from recbole_pos.experiment.result import KNOWS_WHEN, read_result
from recbole_pos.files import whole, write_text
from recbole_pos.runs.worker import QUIET
from recbole_pos.study import schema
from recbole_pos.study.configs import require_twins
from recbole_pos.study.expand import list_fits
from recbole_pos.study.plan import Plan
from recbole_pos.study.ranks import RankTable, require_metrics
from recbole_pos.study.rendered_table import RenderedTable
from recbole_pos.study.result_tables import all_tables, markdown, tidy
from recbole_pos.study.results import DONE, FAILED, VALIDATION, Comparison, Results, compare
from recbole_pos.study.spaces import mean_of_seeds
from recbole_pos.study.study_file import make_plan
from recbole_pos.study.study_folder import KNOWN_FROM, StudyFolder, known_from
from recbole_pos.study.study_report import html
from recbole_pos.study.study_source import Source, read_source
from recbole_pos.study.ties import TieCount
from recbole_pos.values import escape_formula, short
from recbole_pos.yaml_files import read_yaml

_DECIMALS = 6  # default of metric_decimal_place


@dataclass(frozen=True)
class Written:
    """The output files of a study, and what is in them.

    Attributes:
        tables: tables to print.
        files: paths of the files.
        pairs: a line for each row and its reference.
        comparisons: numbers of the tables of the plan.
    """

    tables: list[RenderedTable]
    files: list[Path]
    pairs: pd.DataFrame
    comparisons: list[Comparison]


def collect_results(plan: Plan, folder: StudyFolder) -> Results:
    """Return the results of a study so far, from the folders of its runs.

    Raises:
        UsageError: if a file of a run is damaged.
    """
    lines, ranks, curves, trials = [], {}, [], []
    metric, facts = plan.metrics[0], folder.facts()
    current, chosen, unmade = folder.current(plan), facts.get("chosen", {}), facts.get("unmade", {})
    valid_metric = str(plan.base.get("valid_metric", metric)).lower()  # of studies of 0.1
    made_with: list[dict[str, str]] = []
    for fit in list_fits(plan):
        digest = current.get(fit.name, "")
        run_facts = folder.fit(digest)
        if run_facts is None:
            if fit.name in unmade and fit.trial is None:
                failed = {"status": FAILED, "reason": unmade[fit.name], "path": ""}
                lines.append({"row": fit.row, "seed": fit.seed, **failed})
            continue
        run = folder.run(digest)
        run_facts = {"status": "", **run_facts, "row": fit.row, "seed": fit.seed, "digest": digest}
        if fit.stage == "trial":
            chosen_by = facts.get("chosen_by", {}).get(fit.row, valid_metric)
            options = (run_facts.get("searched") or {}).items()
            line = {"row": fit.row, "trial": fit.trial}
            line["options"] = ", ".join(f"{name}: {option}" for name, option in options)
            line |= {
                "value": (run_facts.get("best_valid") or {}).get(chosen_by),
                "metric": chosen_by,
            }
            trials.append({**line, "chosen": chosen.get(fit.row) == fit.trial})
            continue
        lines.append(_line(run_facts, run, folder.path, metric))
        if fit.stage == "retest":  # nothing was trained
            lines[-1] |= {"seconds": None, "epochs": None, VALIDATION: None}
        else:
            curves += _curve(run_facts, run, metric)
        made_with.append(run_facts.get("versions") or {})
        if run_facts["status"] == DONE and run.ranks.is_file():
            ranks[(fit.row, fit.seed)] = _ranks(run_facts, run)
    facts = {**facts, "versions": _all_versions(made_with) or facts.get("versions", {})}
    return _results(plan, lines, ranks, curves, trials, _command(plan, folder), facts)


def _all_versions(runs: list[dict[str, str]]) -> dict[str, str]:
    """Return package -> version, or all versions if runs were made with several."""
    names = dict.fromkeys(name for versions in runs for name in versions)
    by_name = {name: dict.fromkeys(v[name] for v in runs if name in v) for name in names}
    return {name: ", ".join(versions) for name, versions in by_name.items()}


def _command(plan: Plan, folder: StudyFolder) -> str:
    """Return the command that repeats a study.

    It names the file of the study if that still has the same content, except for the place of the
    data and the dataset, and else the folder.
    """
    try:
        written = read_source(plan.source.name).content
    except UsageError:
        return f"recbole-pos compare {folder.path}"
    content = {**plan.source.content, "base": dict(plan.source.content.get("base") or {})}
    elsewhere = content["base"].pop("data_path", None)
    other = f" -d {plan.dataset}" * (content["dataset"] != written.get("dataset"))
    if other:  # figures of a paper are left out with other data
        content = {**content, "dataset": written.get("dataset"), "paper": written.get("paper")}
        content = {key: value for key, value in content.items() if value is not None}
    if content != {**written, "base": written.get("base") or {}}:
        return f"recbole-pos compare {folder.path}"
    return f"recbole-pos compare {plan.source.name}{other}{' --data_path FOLDER' * bool(elsewhere)}"


def _line(facts: dict[str, Any], run: RunFolder, root: Path, metric: str) -> dict[str, Any]:
    """Return a run as a line of ``runs.csv``.

    Args:
        facts: facts of the run.
        run: folder of the run.
        root: folder to which its path is relative.
        metric: metric of its best epoch in validation.
    """
    path, device, text = run.path, facts.get("device") or {}, ""
    if device:  # ``cpu (AMD EPYC, AVX512), 1 thread, float32``; older runs have no processor
        processor = f" ({device['processor']})" if device.get("processor") else ""
        threads = f"{device['threads']} thread{'s' * (device['threads'] != 1)}"
        text = f"{device['name']}{processor}, {threads}, {device['precision']}"
    return {
        **{key: facts[key] for key in ("row", "seed", "status")},
        "reason": facts.get("reason", ""),
        **(facts.get("test") or {}),
        VALIDATION: (facts.get("best_valid") or {}).get(metric),
        "seconds": (facts.get("seconds") or {}).get("training"),
        **{key: facts.get(key) for key in ("parameters", "epochs")},
        "device": text,
        **{key: facts.get(key, "") for key in ("commit", "digest", KNOWN_FROM)},
        "request_time": facts.get("request_time", "none"),
        "path": str(path.relative_to(root) if path.is_relative_to(root) else path),
    }


def _ranks(facts: dict[str, Any], run: RunFolder) -> pd.DataFrame:
    """Return the ranks of the targets of a run, a line for each target.

    Raises:
        UsageError: if the metrics in ``facts`` do not agree with them, or the file is damaged.
    """
    name, test = str(run.ranks), facts.get("test") or {}
    advice = f"delete {run.path}, and make the run again"
    try:
        frame = pd.read_parquet(run.ranks)
        rank = frame["rank"].to_numpy(dtype=float)
    except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
        raise UsageError(f"{name} is damaged: {short(str(error))}; {advice}") from error
    try:
        require_metrics(test, rank, _DECIMALS, name)
    except UsageError:  # unless the configuration rounds more
        require_metrics(test, rank, int(read_yaml(run.config)["metric_decimal_place"]), name)
    return frame


def _curve(facts: dict[str, Any], run: RunFolder, metric: str) -> list[dict[str, Any]]:
    """Return the validation of a run by epoch, as lines of row, seed, epoch and value.

    Raises:
        UsageError: if the file is too long, or a line is damaged.
    """
    try:
        with run.metrics.open("rb") as file:
            content = file.read(schema.MOST_BYTES + 1)
    except OSError:
        return []
    if len(content) > schema.MOST_BYTES:
        raise UsageError(f"{run.metrics}: more than {schema.MOST_BYTES >> 20} MiB, expected less")
    whole_lines = content[: content.rfind(b"\n") + 1]  # the last one may be being written
    lines = schema.epochs(whole_lines, str(run.metrics))
    values = {line["epoch"] + 1: (line.get("valid") or {}).get(metric) for line in lines}
    ids = {"row": facts["row"], "seed": facts["seed"]}
    return [{**ids, "epoch": n, "value": value} for n, value in values.items() if value is not None]


def _searches(trials: list[dict[str, Any]], seeds: int) -> pd.DataFrame:
    """Return a line for each trial, with its mean over seeds; nan while a seed has no value."""
    values: dict[tuple[str, int], list[float | None]] = {}
    lines = {(trial["row"], trial["trial"]): trial for trial in trials}
    for trial in trials:
        values.setdefault((trial["row"], trial["trial"]), []).append(trial["value"])
    means = [{**lines[key], "value": mean_of_seeds(values[key], seeds)} for key in lines]
    return pd.DataFrame(means).sort_values(["row", "trial"], ignore_index=True)


def _results(
    plan: Plan,
    lines: list[dict[str, Any]],
    ranks: dict[tuple[str, int], pd.DataFrame],
    curves: list[dict[str, Any]],
    trials: list[dict[str, Any]],
    command: str,
    facts: dict[str, Any],
) -> Results:
    """Return results with lines and ranks in the order of the plan's rows and of seeds.

    Args:
        plan: plan of the study.
        lines: lines of runs, as of :func:`_line`.
        ranks: (row, seed) -> ranks of the run.
        curves, trials: lines of epochs and of trials.
        command: command that repeats the study.
        facts: facts of the study, as of :meth:`StudyFolder.facts`.
    """
    places = {row: place for place, row in enumerate(plan.rows)}
    lines.sort(key=lambda line: (places[line["row"]], line["seed"]))
    ranks = dict(sorted(ranks.items(), key=lambda item: (places[item[0][0]], item[0][1])))
    frames = {}
    if curves:
        frames["curves"] = pd.DataFrame(curves)
    if trials:
        frames["searches"] = _searches(trials, len(plan.tried_with))
    # a warning beside metrics of models that know the time of their target
    know = dict.fromkeys(line["row"] for line in lines if line.get("request_time") == "target")
    know_when = (f"{', '.join(know)}: {KNOWS_WHEN}",) if know else ()
    return Results(
        plan=plan,
        runs=pd.DataFrame(lines) if lines else pd.DataFrame(columns=["row", "seed", "status"]),
        ranks=RankTable.from_runs(ranks) if ranks else None,
        curve_metric=plan.metrics[0],
        commands=(command,),
        ties=TieCount(**facts["ties"]) if facts.get("ties") else None,
        warnings=(*(facts.get("warnings") or ()), *know_when),
        data=facts.get("data", {}),
        versions=facts.get("versions", {}),
        **frames,
    )


def collect_runs(paths: Sequence[Path], reference: str | None = None) -> Results:
    """Return the results of runs that exist already, of the same data and split.

    Args:
        paths: folders of the runs.
        reference: name of the row that others are compared to; the first if None.

    Raises:
        UsageError: naming a run that is not finished, or two of different data or splits.
    """
    rows: dict[str, dict[str, Any]] = {}
    lines, curves = [], []
    ranks: dict[tuple[str, int], pd.DataFrame] = {}
    configs = [_require_comparable(path) for path in paths]
    names = _names(configs)
    require_twins(dict(zip(names, configs, strict=True)))
    metric = str(configs[0].get("valid_metric", "ndcg@10")).lower()
    first = None
    for path, config, name in zip(paths, configs, names, strict=True):
        run, seed = RunFolder(path), config["seed"]
        data = checkpoint.load(run.checkpoint, ("data",))
        first = first or (path, config, data)
        _require_same(first, (path, config, data))
        if (name, seed) in ranks:
            raise UsageError(
                f"compare: {path} is a run of {name} with a seed that is there already"
            )
        run_facts = {**asdict(read_result(run)), "row": name, "seed": seed, "status": DONE}
        rows[name] = {"model": config["model"]}
        if config.get("item_vectors"):
            rows[name]["item_vectors"] = config["item_vectors"]
        lines.append(_line(run_facts, run, Path(), metric))
        curves += _curve(run_facts, run, metric)
        ranks[(name, seed)] = _ranks(run_facts, run)
    dataset = str(configs[0]["dataset"])
    content = {"dataset": dataset, "title": f"{len(paths)} runs on {dataset}", "rows": rows}
    content["seeds"] = sorted({config["seed"] for config in configs})
    content |= {"reference": reference} if reference else {}
    plan = make_plan(Source("command line", content))
    command = f"recbole-pos compare {' '.join(map(str, paths))}"
    first_result = read_result(RunFolder(paths[0]))  # all have the same data
    warnings = [text for text in first_result.warnings if text != KNOWS_WHEN]
    facts = {"versions": first_result.versions, "warnings": warnings}
    return _results(plan, lines, ranks, curves, [], command, facts)


def _require_comparable(path: Path) -> dict[str, Any]:
    """Return the configuration of a run; a UsageError without weights, ranks and result."""
    if source := known_from(path):
        raise UsageError(
            f"compare: {path} was taken from {source}, without weights; give that file to its "
            "study, `compare STUDY --known`"
        )
    run = RunFolder(path).require()
    if not run.result.is_file():
        raise UsageError(f"compare: {path} is not finished: continue it with --resume {path}")
    if not run.ranks.is_file():
        raise UsageError(
            f"compare: {path} has no test_ranks.parquet, as runs of 0.1 have none; "
            f"`recbole-pos run --resume {path}` tests it again and writes it"
        )
    return read_yaml(run.config)


def _names(configs: list[dict[str, Any]]) -> list[str]:
    """Return names of runs as rows: the model, and the options in which its runs differ."""
    indifferent = {*QUIET, "seed", "data_path", "gpu_id", "init_from", "update_from"}
    names = []
    for config in configs:
        alike = [other for other in configs if other["model"] == config["model"]]
        differing = ", ".join(
            f"{key}: {config[key]}"
            for key in config
            if key not in indifferent and any(other.get(key) != config[key] for other in alike)
        )
        names.append(config["model"] + f" ({differing})" * bool(differing))
    return names


def _require_same(one: tuple, other: tuple) -> None:
    """Raise a UsageError unless two runs were tested on the same targets, among the same items.

    Args:
        one, other: path, configuration and checkpoint of each run.
    """
    keys = (
        "dataset",
        "eval_args",
        "mask_history",
        "train_fraction",
        "session_filter",
        "target_events",
    )
    differ = [
        f"{key} is {other[1].get(key)} in one and {one[1].get(key)} in the other"
        for key in keys
        if one[1].get(key) != other[1].get(key)
    ]
    if (one[2].get("data") or "")[:32] != (other[2].get("data") or "")[:32]:
        differ.append("the events, or what is held out of them, are not the same")
    if differ:
        raise UsageError(f"compare: {other[0]} and {one[0]} cannot be compared: {differ[0]}")


def write_results(results: Results, folder: Path) -> Written:
    """Write table.md, table.csv, runs.csv, runs.parquet and report.html into a folder."""
    make_folder(folder)
    comparisons = [compare(results, table) for table in results.plan.tables]
    tables = all_tables(results, comparisons)
    pairs = pd.concat([found.differences for found in comparisons], ignore_index=True)
    write_text(folder / "table.md", markdown(results, comparisons))
    write_text(folder / "table.csv", _csv(tidy(comparisons)))
    write_text(folder / "runs.csv", _csv(results.runs))
    with whole(folder / "runs.parquet", text=False) as file:
        results.runs.to_parquet(file, index=False)
    write_text(folder / "report.html", html(results, comparisons))
    names = ("table.md", "table.csv", "runs.csv", "runs.parquet", "report.html")
    return Written(tables, [folder / name for name in names], pairs, comparisons)


def _csv(frame: pd.DataFrame) -> str:
    """Return a table as text for spreadsheets: no cell begins as a formula does."""
    return frame.apply(lambda column: column.map(escape_formula)).to_csv(index=False)
