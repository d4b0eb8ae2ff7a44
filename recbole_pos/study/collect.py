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
from recbole_pos.study.expand import fits
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
from recbole_pos.values import no_formula, short
from recbole_pos.yaml_files import read_yaml

_DECIMALS = 6  # of metrics in files, unless metric_decimal_place says otherwise


@dataclass(frozen=True)
class Written:
    """What was written of results.

    Attributes:
        tables: as they are printed.
        files: paths.
        pairs: a line a row and its reference.
        comparisons: the numbers of the tables of the plan.
    """

    tables: list[RenderedTable]
    files: list[Path]
    pairs: pd.DataFrame
    comparisons: list[Comparison]


def collect_results(plan: Plan, folder: StudyFolder) -> Results:
    """Return what the runs of a study have found so far."""
    lines, ranks, curves, trials = [], {}, [], []
    metric, facts = plan.metrics[0], folder.facts()
    current, chosen, unmade = folder.current(plan), facts.get("chosen", {}), facts.get("unmade", {})
    valid_metric = str(plan.base.get("valid_metric", metric)).lower()  # of studies of 0.1
    made_with: list[dict[str, str]] = []
    for one in fits(plan):
        digest = current.get(one.name, "")
        known = folder.fit(digest)
        if known is None:
            if one.name in unmade and one.trial is None:
                failed = {"status": FAILED, "reason": unmade[one.name], "path": ""}
                lines.append({"row": one.row, "seed": one.seed, **failed})
            continue
        run = folder.run(digest)
        known = {"status": "", **known, "row": one.row, "seed": one.seed, "digest": digest}
        if one.stage == "trial":
            by = facts.get("chosen_by", {}).get(one.row, valid_metric)
            options = (known.get("searched") or {}).items()
            line = {"row": one.row, "trial": one.trial}
            line["options"] = ", ".join(f"{name}: {option}" for name, option in options)
            line |= {"value": (known.get("best_valid") or {}).get(by), "metric": by}
            trials.append({**line, "chosen": chosen.get(one.row) == one.trial})
            continue
        lines.append(_line(known, run, folder.path, metric))
        if one.stage == "retest":  # nothing was trained
            lines[-1] |= {"seconds": None, "epochs": None, VALIDATION: None}
        else:
            curves += _curve(known, run, metric)
        made_with.append(known.get("versions") or {})
        if known["status"] == DONE and run.ranks.is_file():
            ranks[(one.row, one.seed)] = _ranks(known, run)
    facts = {**facts, "versions": _all_versions(made_with) or facts.get("versions", {})}
    return _results(plan, lines, ranks, curves, trials, _command(plan, folder), facts)


def _all_versions(runs: list[dict[str, str]]) -> dict[str, str]:
    """Package -> version, or versions where runs were made with several."""
    names = dict.fromkeys(name for versions in runs for name in versions)
    found = {name: dict.fromkeys(v[name] for v in runs if name in v) for name in names}
    return {name: ", ".join(versions) for name, versions in found.items()}


def _command(plan: Plan, folder: StudyFolder) -> str:
    """Return how the study is run again: by its file, if that still says the same of all but the
    place."""
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


def _line(known: dict[str, Any], run: RunFolder, root: Path, metric: str) -> dict[str, Any]:
    """Return a run as a line of a table, with its best ``metric`` in validation."""
    path, device, text = run.path, known.get("device") or {}, ""
    if device:  # ``cpu (AMD EPYC, AVX512), 1 thread, float32``; older runs have no processor
        processor = f" ({device['processor']})" if device.get("processor") else ""
        threads = f"{device['threads']} thread{'s' * (device['threads'] != 1)}"
        text = f"{device['name']}{processor}, {threads}, {device['precision']}"
    return {
        **{key: known[key] for key in ("row", "seed", "status")},
        "reason": known.get("reason", ""),
        **(known.get("test") or {}),
        VALIDATION: (known.get("best_valid") or {}).get(metric),
        "seconds": (known.get("seconds") or {}).get("training"),
        **{key: known.get(key) for key in ("parameters", "epochs")},
        "device": text,
        **{key: known.get(key, "") for key in ("commit", "digest", KNOWN_FROM)},
        "request_time": known.get("request_time", "none"),
        "path": str(path.relative_to(root) if path.is_relative_to(root) else path),
    }


def _ranks(known: dict[str, Any], run: RunFolder) -> pd.DataFrame:
    """Where the targets of a run stood.

    Raises:
        UsageError: if its metrics do not follow from them, or the file is damaged.
    """
    name, test = str(run.ranks), known.get("test") or {}
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


def _curve(known: dict[str, Any], run: RunFolder, metric: str) -> list[dict[str, Any]]:
    """Validation by epoch."""
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
    of = {"row": known["row"], "seed": known["seed"]}
    return [{**of, "epoch": n, "value": value} for n, value in values.items() if value is not None]


def _searches(trials: list[dict[str, Any]], seeds: int) -> pd.DataFrame:
    """Return a line a trial, with the mean over its seeds; no value while one of them has none."""
    values: dict[tuple[str, int], list[float | None]] = {}
    lines = {(one["row"], one["trial"]): one for one in trials}
    for one in trials:
        values.setdefault((one["row"], one["trial"]), []).append(one["value"])
    found = [{**lines[key], "value": mean_of_seeds(values[key], seeds)} for key in lines]
    return pd.DataFrame(found).sort_values(["row", "trial"], ignore_index=True)


def _results(
    plan: Plan,
    lines: list[dict[str, Any]],
    ranks: dict[tuple[str, int], pd.DataFrame],
    curves: list[dict[str, Any]],
    trials: list[dict[str, Any]],
    command: str,
    facts: dict[str, Any],
) -> Results:
    places = {row: place for place, row in enumerate(plan.rows)}
    lines.sort(key=lambda line: (places[line["row"]], line["seed"]))
    ranks = dict(sorted(ranks.items(), key=lambda item: (places[item[0][0]], item[0][1])))
    more = {}
    if curves:
        more["curves"] = pd.DataFrame(curves)
    if trials:
        more["searches"] = _searches(trials, len(plan.tried_with))
    # what must stand beside metrics of models that knew the time of what they predict
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
        **more,
    )


def of_runs(paths: Sequence[Path], reference: str | None = None) -> Results:
    """Return runs that exist already, side by side: same data, same split.

    Args:
        paths: their folders.
        reference: name of a row; the first when None.

    Raises:
        UsageError: if one is not finished, or two are of other data or another split; says which.
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
        known = {**asdict(read_result(run)), "row": name, "seed": seed, "status": DONE}
        rows[name] = {"model": config["model"]}
        if config.get("item_vectors"):
            rows[name]["item_vectors"] = config["item_vectors"]
        lines.append(_line(known, run, Path(), metric))
        curves += _curve(known, run, metric)
        ranks[(name, seed)] = _ranks(known, run)
    dataset = str(configs[0]["dataset"])
    content = {"dataset": dataset, "title": f"{len(paths)} runs on {dataset}", "rows": rows}
    content["seeds"] = sorted({config["seed"] for config in configs})
    content |= {"reference": reference} if reference else {}
    plan = make_plan(Source("command line", content))
    command = f"recbole-pos compare {' '.join(map(str, paths))}"
    made = read_result(RunFolder(paths[0]))  # all have the same data
    warnings = [text for text in made.warnings if text != KNOWS_WHEN]
    facts = {"versions": made.versions, "warnings": warnings}
    return _results(plan, lines, ranks, curves, [], command, facts)


def _require_comparable(path: Path) -> dict[str, Any]:
    """Require a finished run with its weights and ranks; return its configuration."""
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
    """Return names that tell runs apart: the model, and the options in which runs of it differ."""
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
    """Two runs must have been tested on the same targets, among the same items."""
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
    """table.md, table.csv, runs.csv, runs.parquet and report.html."""
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
    return frame.apply(lambda column: column.map(no_formula)).to_csv(index=False)
