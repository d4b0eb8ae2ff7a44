"""``make results-attrformer``: AttrFormer beside its Tables 2, 6 and 7 and Figures 3 to 6.

Leave-one-out by exact time, all items ranked, one protocol for all: AttrFormer, its ablations, the
backbone (PosSASRec, what AttrFormer is without relations and posterior targets), TiSASRec's and
DIF-SR's attention on the backbone, and RecBole's models. Nothing is tuned. Runs are kept and
reused, interrupted ones resumed. Writes the part of ``results/attrformer.md`` between the marks of
the dataset, where rows whose runs are not in ``--runs`` keep their line; ``--table`` does only
that, ``--pictures`` draws too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from study import ROOT, Study, draw_curves, paired, replace_section, score, written_rows

PAGE = ROOT / "results" / "attrformer.md"
SEEDS = [2020, 2021, 2022, 2023, 2024]
METRICS = ["recall@5", "recall@20", "ndcg@5", "ndcg@20"]
PROTOCOL: dict[str, Any] = {
    "metrics": ["Recall", "NDCG"],
    "topk": [5, 20],
    "valid_metric": "NDCG@20",
    "learning_rate": 1e-3,
    "MAX_ITEM_LIST_LENGTH": 50,
    "stopping_step": 10,
    "show_progress": False,
}
SIZES: dict[str, dict[str, Any]] = {
    "small": {"hidden_size": 64, "inner_size": 256, "n_layers": 2, "n_heads": 2},
    "paper": {"hidden_size": 256, "inner_size": 1024, "n_layers": 4, "n_heads": 8},  # Table 4, B.3
}
INTER = ["user_id", "item_id", "timestamp"]
BEHAVIOUR = ["also_bought", "also_viewed", "bought_together"]
TIME, POSITION = {"field": "time"}, {"field": "position"}


def behaviour(fields: list[str]) -> list[dict[str, Any]]:
    """Fields of items that come from behaviour."""
    return [{"field": field, "source": "behaviour"} for field in fields]


# models that take a row for every target, on Amazon: about as many targets a step as the backbone's
# 128 windows have, and the newest 20 events (all of nine histories in ten), for their cost
ROWS = {"train_batch_size": 1024, "MAX_ITEM_LIST_LENGTH": 20}
# what each log has: fields to load, relations by source, fields for SASRecF and DIF-SR, dropout
LOGS: dict[str, dict[str, Any]] = {
    "amazon-beauty": {
        "load_col": {"inter": INTER, "item": ["item_id", "brand", "categories", *BEHAVIOUR]},
        "item": ["brand", "categories"],
        "behaviour": [*behaviour(BEHAVIOUR), TIME],
        "user": [],
        "features": ["brand", "categories"],
        "dropout": 0.5,
        "rows": ROWS,
    },
    "amazon-toys": {
        "load_col": {"inter": INTER, "item": ["item_id", "attributes"]},
        "item": ["attributes"],
        "behaviour": [TIME],
        "user": [],
        "features": ["attributes"],
        "dropout": 0.5,
        "rows": ROWS,
    },
    "ml-1m": {
        "load_col": {
            "inter": INTER,
            "item": ["item_id", "genre"],
            "user": ["user_id", "age", "gender", "occupation"],
        },
        "item": ["genre"],
        "behaviour": [],  # its times only number the events
        "user": ["age", "gender", "occupation"],
        "features": ["genre"],
        "dropout": 0.2,
    },
    "toyshop": {  # comes with the repository; minutes
        "load_col": {
            "inter": INTER,
            "item": ["item_id", "brand", "category", "price"],
            "user": ["user_id", "age", "country"],
        },
        "item": ["brand", "category", {"field": "price", "within": "brand"}],
        "behaviour": [TIME],
        "user": [{"field": "age", "scales": [10]}, "country"],
        "features": ["brand", "category"],
        "dropout": 0.2,
        "windows": 16,
        "rows": {"train_batch_size": 128},
    },
    "ml-100k": {
        "load_col": {
            "inter": INTER,
            "item": ["item_id", "class"],
            "user": ["user_id", "age", "gender", "occupation"],
        },
        "item": ["class"],
        "behaviour": [TIME],
        "user": ["age", "gender", "occupation"],
        "features": ["class"],
        "dropout": 0.2,
    },
}
# Tables 2 and 6: Recall@5, Recall@20, NDCG@5, NDCG@20
PAPER = {
    "amazon-beauty": {
        "GRU4Rec (RecBole)": "0.0349 / 0.0817 / 0.0231 / 0.0362",
        "SASRec (RecBole)": "0.0556 / 0.1107 / 0.0343 / 0.0540",
        "BERT4Rec (RecBole)": "0.0382 / 0.0783 / 0.0265 / 0.0378",
        "LightSANs (RecBole)": "0.0561 / 0.1222 / 0.0342 / 0.0528",
        "SASRecF (RecBole)": "0.0587 / 0.1231 / 0.0413 / 0.0594",
        "TiSASRec's attention": "0.0576 / 0.1244 / 0.0344 / 0.0534",
        "DIF-SR's attention": "0.0578 / 0.1273 / 0.0337 / 0.0535",
        "AttrFormer": "0.0657 / 0.1324 / 0.0446 / 0.0639",
        "AttrFormer, item attributes": "0.0633 / 0.1325 / 0.0441 / 0.0636",
        "AttrFormer, behaviour, categorical": "0.0641 / 0.1324 / 0.0444 / 0.0635",
        "AttrFormer, behaviour, numerical": "0.0636 / 0.1309 / 0.0444 / 0.0633",
    },
    "amazon-toys": {
        "GRU4Rec (RecBole)": "0.0271 / 0.0654 / 0.0175 / 0.0368",
        "SASRec (RecBole)": "0.0600 / 0.1073 / 0.0435 / 0.0570",
        "BERT4Rec (RecBole)": "0.0364 / 0.0691 / 0.0265 / 0.0356",
        "LightSANs (RecBole)": "0.0632 / 0.1273 / 0.0370 / 0.0552",
        "SASRecF (RecBole)": "0.0585 / 0.1217 / 0.0393 / 0.0571",
        "TiSASRec's attention": "0.0666 / 0.1325 / 0.0379 / 0.0566",
        "DIF-SR's attention": "0.0675 / 0.1342 / 0.0380 / 0.0569",
        "AttrFormer": "0.0720 / 0.1357 / 0.0501 / 0.0681",
        "AttrFormer, item attributes": "0.0714 / 0.1351 / 0.0501 / 0.0682",
        "AttrFormer, behaviour, numerical": "0.0709 / 0.1356 / 0.0500 / 0.0683",
    },
    "ml-1m": {
        "GRU4Rec (RecBole)": "0.1752 / 0.3579 / 0.1172 / 0.1687",
        "SASRec (RecBole)": "0.1854 / 0.3483 / 0.1285 / 0.1745",
        "BERT4Rec (RecBole)": "0.1341 / 0.2728 / 0.1120 / 0.1311",
        "LightSANs (RecBole)": "0.1840 / 0.3590 / 0.1226 / 0.1725",
        "SASRecF (RecBole)": "0.1829 / 0.3553 / 0.1239 / 0.1726",
        "TiSASRec's attention": "0.1816 / 0.3558 / 0.1216 / 0.1711",
        "DIF-SR's attention": "0.1518 / 0.3195 / 0.0964 / 0.1440",
        "AttrFormer": "0.2258 / 0.4128 / 0.1554 / 0.2088",
    },
}
BACKBONE = "PosSASRec, the backbone"
DRAWN = ("backbone, newest window", "all but posterior targets")  # beside Table 2
INFERENCE = ("batch", "training_bank", "own", "none")
PLAIN = {"prior_weight": 0.0, "future_weights": [1.0]}
ALONE = {"chunking": False, "train_windows": "last"}  # SASRec's windows: the newest of each user


def rows(dataset: str, size: dict[str, Any], epochs: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Options of every run, by table and name."""
    log = LOGS[dataset]
    drop = {"hidden_dropout_prob": log["dropout"]}
    windows = {"train_batch_size": log["windows"]} if "windows" in log else {}
    some = log.get("rows", {})
    base = {"model": "PosSASRec", "epochs": epochs, **size, **drop, **windows}
    item, of_behaviour = log["item"], log["behaviour"]
    categorical = [relation for relation in of_behaviour if relation != TIME]
    heads = {"relation_heads": 4 if len(of_behaviour) > 1 else 2}
    of_things = [*item, *of_behaviour, POSITION]
    every = [*of_things, *log["user"]]
    ours = {**base, "model": "AttrFormer", "load_col": log["load_col"], **heads}
    full = {**ours, "relations": every}

    def part(relations: list[Any], **options: Any) -> dict[str, Any]:
        return {**ours, **PLAIN, **ALONE, "relations": relations, **options}

    attention = {"attn_dropout_prob": log["dropout"]}
    recbole = {"epochs": epochs, **size, **drop, **attention}
    everywhere = {"augmentation": "all_positions", **windows}  # as the backbone learns
    gru = {"embedding_size": size["hidden_size"], "hidden_size": size["hidden_size"]}
    fields = {"load_col": log["load_col"], "selected_features": log["features"]}
    difsr = {"position": ["difsr"], "difsr_fields": log["features"]}
    main = {
        "GRU4Rec (RecBole)": {"model": "GRU4Rec", "epochs": epochs, **gru, **everywhere},
        "SASRec (RecBole)": {"model": "SASRec", **recbole, **everywhere},
        "BERT4Rec (RecBole)": {"model": "BERT4Rec", **recbole, **some},
        "LightSANs (RecBole)": {"model": "LightSANs", **recbole, **some},
        "SASRecF (RecBole)": {"model": "SASRecF", **recbole, **fields, **everywhere},
        BACKBONE: base,
        "TiSASRec's attention": {**base, "position": ["tisas"]},
        "DIF-SR's attention": {**base, **difsr, "load_col": log["load_col"]},
        "AttrFormer": full,
    }
    if TIME not in of_behaviour:
        del main["TiSASRec's attention"]
    ablations = {
        "backbone, newest window": {**base, "train_windows": "last"},
        "+ item attributes": part(item),
        "+ behaviour attributes": part(of_behaviour),
        "+ item and behaviour": part([*item, *of_behaviour]),
        "+ position": part([POSITION]),
        "+ user attributes": part(log["user"]),
        "+ posterior targets": {**part([]), "prior_weight": 1.0, "future_weights": [1.0, 0.25]},
        "+ prior": {**part([]), "prior_weight": 1.0},
        "+ future items": {**part([]), "future_weights": [1.0, 0.25]},
        "+ item attributes and chunking": part(item, chunking=True, train_windows="chunk"),
        "all but posterior targets": {**full, **PLAIN},
        "all but chunking": {**full, **ALONE},
        "all but user attributes": {**full, "relations": of_things},
        "all but relations across users": {**full, "cross_sequence": "none"},
        "all, time_respecting": {**full, "cross_sequence": "time_respecting"},
    }
    if not of_behaviour:
        ablations.pop("+ behaviour attributes"), ablations.pop("+ item and behaviour")
        ablations.pop("all, time_respecting")
    elif of_behaviour != [TIME]:  # Table 7
        ablations["+ behaviour, categorical"] = part(categorical)
        ablations["+ behaviour, numerical"] = part([TIME])
    if not log["user"]:
        ablations.pop("+ user attributes"), ablations.pop("all but user attributes")
    same = {  # the whole of AttrFormer on some of the attributes
        "item attributes": item,
        "behaviour, categorical": categorical,
        "behaviour, numerical": [TIME] if TIME in of_behaviour else [],
    }
    attributes = {
        f"AttrFormer, {name}": {**full, "relations": relations}
        for name, relations in same.items()
        if relations
    }
    names = {"top_k": "top-K", "train_batch_size": "batch", "MAX_ITEM_LIST_LENGTH": "length"}
    values = {
        "top_k": (1, 5, 25, 100),
        "train_batch_size": (32, 64, 256, 512),
        "MAX_ITEM_LIST_LENGTH": (10, 25, 100, 150),
    }
    sensitivity = {
        f"AttrFormer, {names[key]} {value}": {**full, key: value}
        for key in names
        for value in values[key]
    }
    lengths = {
        f"backbone, length {value}": {**base, "MAX_ITEM_LIST_LENGTH": value}
        for value in values["MAX_ITEM_LIST_LENGTH"]
    }
    return {
        "main": main,
        "attributes": attributes,
        "ablations": ablations,
        "sensitivity": {**sensitivity, **lengths},
    }


def inference(run: Path, threads: int) -> dict[str, dict[str, float]]:
    """Test metrics of an AttrFormer for every ``inference_relations``, kept in its folder."""
    file = run / "inference.json"
    if not file.exists():
        command = [sys.executable, __file__, "--evaluate", str(run)]
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
        subprocess.run(command, env=env, check=True)
    return json.loads(file.read_text())


def evaluate(run: Path) -> None:
    """Write ``inference.json``: also with smaller and larger batches of predictions (Figure 6)."""
    import recbole_pos
    from recbole_pos.data.loaders import TargetLoader

    made, found = recbole_pos.load(run), {}
    for name in INFERENCE:
        made.model.inference = name
        sizes = (32, 128, 512) if name == "batch" else (128,)
        for size in sizes:
            made.config.final_config_dict["eval_batch_size"] = size
            loader = TargetLoader(made.config, made.loaders["test"]._dataset, None, shuffle=False)
            test = made.trainer.evaluate(loader, load_best_model=False)
            found[f"{name}, {size} at a time" if name == "batch" else name] = dict(test)
    (run / "inference.json").write_text(json.dumps(found))


def tables(
    study: Study,
    plan: dict[str, dict[str, Any]],
    written: dict[str, dict[str, str]],
    threads: int,
) -> str:
    """What the finished runs say; rows that were written before and have no run here stay."""
    heads = [m.replace("recall", "Recall").replace("ndcg", "NDCG") for m in METRICS]
    lines: list[str] = []
    paper = PAPER.get(study.dataset, {})
    for group, title in (
        ("main", "Table 2"),
        ("attributes", "Table 6"),
        ("ablations", "Figure 3 and Table 7"),
        ("sensitivity", "Figures 4 to 6"),
    ):
        done = {name: study.finished(name, SEEDS) for name in plan[group]}
        before = written.get(title, {})
        if not any(done.values()) and not before:
            continue
        last = ["paper"] if any(name in paper for name in plan[group]) else []
        columns = [title, "seeds", *heads, "NDCG@20 to backbone", *last]
        lines += ["", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        for name, runs in done.items():
            if runs:
                cells = [f"{len(runs)}", *(score(runs, metric) for metric in METRICS)]
                cells.append(paired(runs, study.finished(BACKBONE, SEEDS), k=20))
                cells += [paper.get(name, "")] if last else []
                lines.append(f"| {name} | {' | '.join(cells)} |")
            elif name in before:
                lines.append(before[name])
    runs = study.finished("AttrFormer", SEEDS)
    columns = ["AttrFormer, `inference_relations`", "seeds", *heads]
    before = written.get(columns[0], {})
    if runs or before:
        lines += ["", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    if runs:
        found = [inference(run, threads) for run in runs.values()]
        for name in found[0]:
            means = [sum(one[name][m] for one in found) / len(found) for m in METRICS]
            lines.append(f"| {name} | {len(found)} | {' | '.join(f'{x:.4f}' for x in means)} |")
    else:
        lines += before.values()
    return "\n".join(lines).strip()


def pictures(study: Study, names: list[str], size: str) -> None:
    """Learning curves of the rows that are finished, and what the attributes of AttrFormer add."""
    from recbole_pos.inspect.relations import inspect_relations

    done = {name: study.path(name, SEEDS[0]) for name in names if study.finished(name, SEEDS[:1])}
    if not done:
        return
    stem = PAGE.with_name(f"attrformer-{study.dataset}-{size}")
    draw_curves(done, PROTOCOL["valid_metric"].lower(), stem.with_suffix(".png"))
    if "AttrFormer" in done:
        inspect_relations(done["AttrFormer"])
        shutil.copy(done["AttrFormer"] / "relations.png", f"{stem}-relations.png")


def main() -> None:
    """Run what is missing, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="ml-100k", choices=sorted(LOGS))
    parser.add_argument("--data_path", help="folder that holds the dataset's folder")
    parser.add_argument("--runs", type=Path, default=ROOT / "saved" / "results-attrformer")
    parser.add_argument("--size", default="small", choices=list(SIZES))
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument(
        "--groups", nargs="+", default=["main"], help="main attributes ablations sensitivity"
    )
    parser.add_argument("--only", nargs="+", help="names of rows, instead of all of the groups")
    parser.add_argument("--seeds", type=int, default=1, help=f"up to {len(SEEDS)}")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--table", action="store_true", help="only write what is finished")
    parser.add_argument("--pictures", action="store_true", help="draw what is finished, too")
    parser.add_argument(
        "--compare", nargs=2, metavar="ROW", help="only print the paired difference of two rows"
    )
    parser.add_argument("--evaluate", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.evaluate:
        evaluate(given.evaluate)
        return
    protocol = dict(PROTOCOL)
    if given.data_path or given.dataset == "toyshop":
        protocol["data_path"] = given.data_path or str(ROOT / "dataset")
    folder = given.runs / f"{given.dataset}-{given.size}"
    study = Study(given.dataset, folder, protocol, given.processes, given.threads)
    if given.compare:
        one, other = (study.finished(name, SEEDS) for name in given.compare)
        print(f"{' - '.join(given.compare)}, NDCG@20 in 0.0001: {paired(one, other, k=20)}")
        return
    plan = rows(given.dataset, SIZES[given.size], given.epochs)
    for group in given.groups if not given.table else ():
        chosen = {n: o for n, o in plan[group].items() if not given.only or n in given.only}
        for seed in SEEDS[: given.seeds]:
            study.all(study.run, [(name, options, seed) for name, options in chosen.items()])
    mark = f"{given.dataset}, {given.size}"
    text = tables(study, plan, written_rows(PAGE, mark), given.threads)
    replace_section(PAGE, mark, text or "Not run.")
    if given.pictures:
        pictures(study, [*plan["main"], *DRAWN], given.size)


if __name__ == "__main__":
    main()
