"""``make results-posrec``: the PosRec paper's comparison (Tables 2 and 3, Figures 3 to 6 and 13).

Every row has the same protocol: whole sessions split in time, every prefix of a training session an
example, every prefix of a test session a target, the whole catalogue ranked; and the same training,
that of PosRec (section 5.1.5), but for models that only count. No row is tuned. Runs are kept and
reused, interrupted ones resumed. Writes the part of ``results/posrec.md`` between the marks of the
dataset; ``--table`` does only that.

SR-GNN, GC-SAN, STAMP and SASRec are RecBole's classes with the graphs and padding of this package,
which leaves their scores as they are (``tests/test_recbole_variants.py``).
"""

from __future__ import annotations

import argparse
import shutil
import statistics
from fractions import Fraction
from pathlib import Path
from typing import Any

from study import ROOT, Study, own_options, replace_section, result, score, shared_options

from recbole_pos.inspect.encoding import inspect_encoding
from recbole_pos.yaml_files import read_yaml

PAGE = ROOT / "results" / "posrec.md"
PRESETS = ROOT / "properties" / "presets" / "posrec"
SEEDS = [2020, 2021, 2022]
METRICS = {f"{short}@{k}": f"{name}@{k}" for short, name in (("R", "recall"), ("M", "mrr"))
           for k in (5, 10)}  # fmt: skip
# their presets
DATASETS = {"diginetica": "diginetica.yaml", "yoochoose1_64": "yoochoose.yaml"}
STAMP: dict[str, Any] = {"model": "EncodedSTAMP"}
SASREC: dict[str, Any] = {"model": "EncodedSASRec"}
SRGNN: dict[str, Any] = {"model": "AnchoredSRGNN"}
GCSAN: dict[str, Any] = {"model": "AnchoredGCSAN"}
# what a row has beside the preset's options for its model
OVERALL: dict[str, dict[str, Any]] = {
    "POP": {"model": "Pop"},
    "S-POP": {"model": "SPop"},
    "Item-KNN": {"model": "SessionKNN"},
    "BPR-MF": {"model": "SessionBPR"},
    "FPMC": {"model": "SessionFPMC"},
    "GRU4REC": {"model": "GRU4Rec"},
    "NARM": {"model": "NARM"},
    "STAMP": {**STAMP, "position": ["nope"]},
    "SR-GNN": {**SRGNN, "anchors": False},
    "FGNN": {"model": "FGNN"},
    "GC-SAN": {**GCSAN, "anchors": False},
    "SASRec": {**SASREC, "position": ["lpe"]},
    "PosRec": {"model": "PosRec"},
}
COUNTING = ("POP", "S-POP", "Item-KNN")
ENCODINGS = "nope spe lpe rspe lrpe aspe alpe spe2d lpe2d dpe ldpe".split()
LAMBDAS = (0.25, 0.5, 1.0, 2.0)
# R@5, R@10, M@5, M@10 of Tables 2 and 3
PAPER: dict[str, dict[str, tuple[float, float, float, float]]] = {
    "yoochoose1_64": {
        "POP": (2.37, 4.56, 0.56, 1.13),
        "S-POP": (9.96, 20.18, 15.25, 17.96),
        "Item-KNN": (28.35, 41.82, 19.37, 21.24),
        "BPR-MF": (7.64, 20.47, 8.58, 11.65),
        "FPMC": (22.93, 35.38, 11.83, 14.57),
        "GRU4REC": (37.81, 50.30, 20.13, 22.81),
        "NARM": (44.69, 57.56, 25.43, 27.16),
        "STAMP": (46.42, 58.67, 28.05, 29.66),
        "SR-GNN": (47.33, 60.04, 28.32, 30.08),
        "FGNN": (47.12, 60.13, 28.45, 30.17),
        "GC-SAN": (46.48, 59.47, 27.58, 29.33),
        "SASRec": (46.65, 58.98, 28.13, 29.87),
        "PosRec": (47.96, 60.90, 28.83, 30.57),
        "STAMP+LDPE": (46.78, 58.82, 28.31, 29.94),
        "SASRec+LDPE": (46.89, 59.17, 28.37, 30.11),
    },
    "diginetica": {
        "POP": (0.34, 0.68, 0.06, 0.13),
        "S-POP": (2.67, 9.95, 9.32, 11.79),
        "Item-KNN": (11.75, 24.09, 8.34, 10.63),
        "BPR-MF": (0.78, 2.28, 0.07, 0.83),
        "FPMC": (4.49, 15.71, 2.86, 5.17),
        "GRU4REC": (21.87, 32.67, 11.83, 13.26),
        "NARM": (24.43, 36.09, 12.48, 14.02),
        "STAMP": (25.85, 37.46, 14.42, 15.96),
        "SR-GNN": (26.53, 37.87, 14.99, 16.49),
        "FGNN": (26.46, 37.82, 15.06, 16.55),
        "GC-SAN": (26.29, 37.75, 14.73, 16.23),
        "SASRec": (25.87, 37.53, 14.37, 16.12),
        "PosRec": (27.30, 38.87, 15.31, 16.85),
        "STAMP+LDPE": (26.23, 37.81, 14.79, 16.34),
        "SASRec+LDPE": (26.26, 37.90, 14.71, 16.53),
    },
}
TITLES = {
    "overall": "Table 2",
    "ldpe": "Table 3: LDPE in other models",
    "encodings": "Encodings in PosRec (Figures 3 and 4)",
    "anchors": "Anchors (Figures 5 and 6)",
    "lambda_2": "lambda_2 (Figure 13)",
}


def studies(preset: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Study -> row -> options. A row that several studies have is one run."""

    def row(**options: Any) -> dict[str, Any]:
        return {**own_options(preset, options["model"]), **options}

    rows = {name: row(**options) for name, options in OVERALL.items()}
    posrec = rows["PosRec"]

    def encoded(name: str) -> str:
        return "PosRec" if [name] == posrec["position"] else f"PosRec {name}"

    def weighted(value: float) -> str:
        return "PosRec" if value == posrec["lambda_2"] else f"PosRec lambda_2 {value:g}"

    def pick(*names: str) -> dict[str, dict[str, Any]]:
        return {name: rows[name] for name in names}

    return {
        "overall": rows,
        "ldpe": {
            **pick("STAMP"),
            "STAMP+LDPE": row(**STAMP, position=["ldpe"]),
            **pick("SASRec"),
            "SASRec+LDPE": row(**SASREC, position=["ldpe"]),
        },
        "encodings": {encoded(name): {**posrec, "position": [name]} for name in ENCODINGS},
        "anchors": {
            **pick("SR-GNN"),
            "SR-GNN+ANC": row(**SRGNN, anchors=True),
            **pick("FGNN"),
            "FGNN+ANC": {**rows["FGNN"], "anchors": True},
            **pick("GC-SAN"),
            "GC-SAN+ANC": row(**GCSAN, anchors=True),
            "PosRec-ANC": {**posrec, "anchors": False},
            **pick("PosRec"),
        },
        "lambda_2": {weighted(value): {**posrec, "lambda_2": value} for value in LAMBDAS},
    }


def table(study: Study, names: list[str], paper: dict[str, tuple[float, ...]]) -> list[str]:
    """The finished rows in percent, beside the paper's where it has numbers."""
    done = {name: study.finished(name, SEEDS) for name in names}
    done = {name: runs for name, runs in done.items() if runs}
    with_paper = any(name in paper for name in done)
    columns = ["model", "seeds", *METRICS]
    columns += [f"paper {name}" for name in METRICS] + ["R@10 to paper"] if with_paper else []
    columns += ["prefixes/s", "peak memory, MB"]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for name, runs in done.items():
        cells = [name, f"{len(runs)}"]
        cells += [score(runs, metric, percent=True) for metric in METRICS.values()]
        if with_paper:
            theirs = paper.get(name, ())
            cells += [f"{value:.2f}" for value in theirs] or [""] * len(METRICS)
            mean = 100 * statistics.mean(result(run)["test"]["recall@10"] for run in runs.values())
            cells.append(f"{mean / theirs[1] - 1:+.1%}" if theirs else "")
        rate = statistics.median(result(run)["targets_per_second"] for run in runs.values())
        cells.append("" if name in COUNTING else f"{rate:,.0f}")
        cells.append(f"{max(result(run)['peak_rss_mb'] for run in runs.values()):,.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def page(study: Study, plan: dict[str, dict[str, Any]], scaled: str) -> str:
    """All studies that have finished rows, with what they were trained and tested on."""
    lines: list[str] = []
    for key, rows in plan.items():
        own = set(rows) - set(OVERALL) if key != "overall" else set(rows)
        if any(study.finished(row, SEEDS) for row in own):
            found = table(study, list(rows), {} if scaled else PAPER[study.dataset])
            lines += ["", f"### {TITLES[key]}", "", *found]
    runs = [
        run for rows in plan.values() for row in rows for run in study.finished(row, SEEDS).values()
    ]
    if not runs:
        return "No run is finished."
    split = result(runs[0])["split"]
    about = (
        f"{split['sessions']['train']:,} training sessions with {split['targets']['train']:,} "
        f"prefixes; {split['targets']['test']:,} test prefixes, {split['cold_targets']['test']:,} "
        "of them with an item that training does not have."
    )
    warning = [
        f"**Scaled down: {scaled}; not the paper's setting, to be compared row by row.**",
        "",
    ]
    return "\n".join([*(warning if scaled else []), about, *lines])


def draw(study: Study, names: dict[str, str]) -> None:
    """Pictures of Figures 7 to 12: fixed encodings, and those that finished runs have learned.

    Args:
        study: the runs.
        names: row -> name of its encoding.
    """
    folder = PAGE.parent
    inspect_encoding(["spe", "dpe"], out=folder)
    for row, name in names.items():
        for run in list(study.finished(row, SEEDS).values())[:1]:
            inspect_encoding([name], trained=run, out=folder)
            picture = folder / f"encoding_{name}.png"
            shutil.move(picture, folder / f"posrec-{study.dataset}-{name}.png")
    for name in ("spe", "dpe"):
        shutil.move(folder / f"encoding_{name}.png", folder / f"posrec-{name}.png")


def chosen(given: argparse.Namespace, plan: dict, parser: argparse.ArgumentParser) -> dict:
    """Row -> options of what is to be run."""
    every = {name: options for rows in plan.values() for name, options in rows.items()}
    names = given.rows.split(",") if given.rows else list(every)
    wanted = (
        given.studies.split(",") if given.studies else list(plan) if given.rows else ["overall"]
    )
    wanted = list(plan) if wanted == ["all"] else wanted
    for kind, asked, known in (("row", names, every), ("study", wanted, plan)):
        if unknown := [name for name in asked if name not in known]:
            parser.error(f"no {kind} {', '.join(unknown)}; there are {', '.join(known)}")
    rows = {name for key in wanted for name in plan[key]}
    return {name: every[name] for name in names if name in rows}


def main() -> None:
    """Run what is missing, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="diginetica", choices=sorted(DATASETS))
    parser.add_argument("--data_path", help="folder that holds the dataset's folder")
    parser.add_argument("--runs", type=Path, default=ROOT / "saved" / "results-posrec")
    parser.add_argument("--studies", help=f"of {', '.join(TITLES)}, or all (default: overall)")
    parser.add_argument("--rows", help="of those studies (of all, if no study is named), as A,B")
    parser.add_argument("--epochs", type=int, help="of models that learn (4)")
    parser.add_argument("--train_fraction", help="train on the newest sessions, such as 1/64")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="of each process")
    parser.add_argument("--table", action="store_true", help="only write what is finished")
    parser.add_argument("--pictures", action="store_true", help="also draw encodings")
    given = parser.parse_args()
    preset = read_yaml(PRESETS / DATASETS[given.dataset])
    plan = studies(preset)
    rows = chosen(given, plan, parser)
    protocol = shared_options(preset)
    protocol |= {
        "eval_batch_size": 512,  # RecBole's 4096 would take gigabytes of scores
        "show_progress": False,
    }
    if given.data_path:
        protocol["data_path"] = given.data_path
    scale = []
    if given.train_fraction and Fraction(given.train_fraction) != 1:
        protocol["train_fraction"] = given.train_fraction
        scale.append(f"the newest {given.train_fraction} of the training sessions")
    if given.epochs and given.epochs != protocol["epochs"]:
        protocol["epochs"] = given.epochs
        scale.append(f"{given.epochs} of {preset['epochs']} epochs")
    scaled = ", ".join(scale)
    mark = f"{given.dataset}, {scaled}" if scaled else given.dataset
    folder = given.runs / mark.replace(", ", "-").replace("/", "of").replace(" ", "-")
    study = Study(given.dataset, folder, protocol, given.processes, given.threads)
    if not given.table:
        jobs = [(n, o, seed) for seed in SEEDS[: given.seeds] for n, o in rows.items()]
        study.all(study.run, jobs)
    if given.pictures:
        draw(study, {"PosRec lpe": "lpe", "PosRec": "ldpe"})
    replace_section(PAGE, mark, page(study, plan, scaled))


if __name__ == "__main__":
    main()
