"""Models of other toolkits beside PosSASRec, on the same targets: ``results/toolkits.md``.

``make toolkits`` writes the split of ml-100k as ``recbole-pos split`` does, and trains each model
of another toolkit on it, in a process and an environment of its own (``peer_workers/*_lists.py``).
The lists are rows of a study (``studies/toolkits/``), which compares them with PosSASRec. Ranks and
costs are kept in ``results/runs/toolkits/``; ``--report`` makes the page again from them. Lists
that are there are not made again, so a stopped call goes on where it was.
"""

from pathlib import Path
from typing import Any

from page import HERE, RESULTS, parse_options, replace_section, run_worker, table
from peer_workers.lists import Task
from training import extrapolate_epoch

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.experiment.build import prepare
from recbole_pos.files import write_json
from recbole_pos.study.configs import make_row_config
from recbole_pos.study.plan import Plan
from recbole_pos.study.study_file import read_plan
from recbole_pos.study.study_folder import read_json

STUDIES, RUNS = HERE.parent / "studies" / "toolkits", RESULTS / "runs"
OURS = "PosSASRec"  # the row that the others are compared with
# What RecTools and RePlay call options of PosSASRec. RecTools has no inner size; RePlay's SasRec
# always scales its embeddings.
NAMES = {
    "hidden_size": ("n_factors", "embedding_dim"),
    "n_layers": ("n_blocks", "num_blocks"),
    "n_heads": ("n_heads", "num_heads"),
    "inner_size": (None, "hidden_dim"),
    "embedding_scale": ("use_scale_factor", None),
    "hidden_dropout_prob": ("dropout_rate", "dropout"),
    "MAX_ITEM_LIST_LENGTH": ("session_max_len", "max_sequence_length"),
    "learning_rate": ("lr", "lr"),
    "train_batch_size": ("batch_size", "batch_size"),
}
HEAD = ("NDCG@10", "HR@10", "difference in NDCG@10 [95% CI]", "epochs", "CPU-s of training")


def train(file: Path, split: Path, config: PosConfig) -> None:
    """Train the model that a file of lists is named after, in a process of its own.

    Args:
        file: such as ``rectools-sasrec-ours-2020.parquet``: toolkit, model, whose settings, seed.
        split: folder of the exported split.
        config: configuration of PosSASRec.
    """
    toolkit, model, whose, seed = file.stem.split("-")
    column = ("rectools", "replay").index(toolkit)
    ours = {names[column]: config[option] for option, names in NAMES.items() if names[column]}
    limits = config["epochs"], config["stopping_step"]
    settings = ours if whose == "ours" else {}
    task = Task(str(split), str(file), model, int(seed), settings, *limits)
    print(f"{file.stem}:", flush=True)
    run_worker(toolkit, f"{toolkit}_lists", task)


def time_epoch(config: PosConfig) -> float:
    """Return the CPU-seconds of an epoch of PosSASRec, from the steps of a few seconds."""
    experiment = prepare(config)
    return extrapolate_epoch(experiment.trainer, experiment.loaders["train"], 5.0)


def measure(plan: Plan, files: list[Path], data: dict[str, Any]) -> dict[str, Any]:
    """Train the models of other toolkits whose lists are not there yet, and return all costs.

    Args:
        plan: the study.
        files: files of lists that it compares.
        data: options of the data.

    Returns:
        Name of a file -> ``seconds`` and ``epochs`` of its training; name of a row that is trained
        here -> CPU-seconds of an epoch.
    """
    config = make_row_config({**plan.make_options(OURS), **data})
    split = files[0].absolute().parent / "split"
    if not split.is_dir():
        parts = recbole_pos.split(plan.dataset, mask_history=config["mask_history"], **data)
        parts.to_folder(split)
    for file in files:
        if not file.is_file():
            train(file.absolute(), split, config)
    costs: dict[str, Any] = {file.stem: read_json(file.with_suffix(".json")) for file in files}
    trained = [name for name, row in plan.rows.items() if not row.predictions]
    for name in trained:
        costs[name] = time_epoch(make_row_config({**plan.make_options(name), **data}))
    return costs


def tabulate(plan: Plan, compared: Any, costs: dict[str, Any], kept: Path) -> str:
    """Return the table of a study in markdown: a row for each model, and figures of each seed.

    Args:
        plan: the study.
        compared: its runs and differences, as ``compare`` returns them.
        costs: of :func:`measure`.
        kept: folder with its kept runs.
    """
    facts, runs, lines = read_json(kept / "facts.json"), compared.runs, []
    for name, row in plan.rows.items():
        # A run is found by its digest, since its row may have had another name; lists have none.
        digests = [digest for digest in runs["digest"][runs["row"] == name] if digest]
        own = [facts[x] for x in digests] or [run for run in facts.values() if run["row"] == name]
        cells = [", ".join(f"{run['test'][x]:.4f}" for run in own) for x in ("ndcg@10", "hit@10")]
        trained = [costs[Path(file).stem] for file in row.predictions.values()]
        if not trained:  # the row was trained here
            trained = [{**run, "seconds": run["epochs"] * costs[name]} for run in own]
        difference = ""
        if name != OURS:
            found = compared.pairs.set_index("row").loc[name]
            form = "{difference:+.4f}" + "*" * bool(found["star"]) + " [{low:+.4f}, {high:+.4f}]"
            difference = form.format(**found)
        spent = [", ".join(f"{run[x]:,.0f}" for run in trained) for x in ("epochs", "seconds")]
        lines.append([name, *cells, difference, *spent])
    return table(("model", *HEAD), lines)


def main() -> None:
    """Train and compare what the studies name, and write their tables into the page."""
    args = parse_options(__doc__, studies=["ml-100k"], data_path="", report=False)
    data = {"data_path": args.data_path} if args.data_path else {}
    for name in args.studies:
        study, kept = STUDIES / f"{name}.yaml", RUNS / "toolkits" / name
        plan = read_plan(study)
        files = [Path(file) for row in plan.rows.values() for file in row.predictions.values()]
        costs = read_json(kept / "costs.json") if args.report else measure(plan, files, data)
        # Runs that are kept are not made again. One trains at a time, so that times are its own.
        known = [kept, RUNS / name, RUNS / "reference" / name]
        known = [path for path in known if (path / "facts.json").is_file()]
        given = {"known": known, "report": args.report, "pack": kept, "max_concurrent": 1}
        compared = recbole_pos.compare(str(study), config_dict=data, **given)
        write_json(kept / "costs.json", costs)
        replace_section(RESULTS / "toolkits.md", name, tabulate(plan, compared, costs, kept))


if __name__ == "__main__":
    main()
