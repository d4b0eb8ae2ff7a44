"""``make results-kernel``: the kernel attention paper's comparison (its Tables 2 and 4).

Every scheme runs on the same backbone, split and search: each dropout of ``SEARCH`` once, the best
on validation then with all seeds. Runs are kept and reused, interrupted ones resumed. Test ranks of
every target are kept too, so that schemes are compared target by target. Writes the part of
``results/kernel_attention.md`` between the marks of the dataset; ``--table`` only does that.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from study import (
    ROOT,
    Study,
    gains,
    own_options,
    paired,
    replace_section,
    result,
    score,
    shared_options,
)

from recbole_pos.yaml_files import read_yaml

PRESETS = ROOT / "properties" / "presets"
PAGE = ROOT / "results" / "kernel_attention.md"
SEEDS = [2020, 2021, 2022]
SEARCH = [0.3, 0.2]
PRESET = PRESETS / "kernel_attention" / "beauty.yaml"  # what all runs have in common
SCHEMES: dict[str, dict[str, Any]] = {
    "NoPE": {"position": ["nope"]},
    "Classic": {"position": ["learned"]},
    "RoPE": {"position": ["rope"]},
    "CAPE": {"position": ["cape"]},
    "Ours": {"position": ["kernel"]},
}
ATTACHED = ["RoPE", "CAPE"]
KINDS = {"T-T": ("toeplitz", "toeplitz"), "T-F": ("toeplitz", "full"), "F-T": ("full", "toeplitz")}
VARIANTS: dict[str, dict[str, Any]] = {
    f"{kind} {'shared' if shared else 'per layer'}": {
        "position": ["kernel"],
        "kernel_u": u,
        "kernel_l": values,
        "kernel_u_shared": shared,
        "kernel_l_shared": shared,
    }
    for kind, (u, values) in KINDS.items()
    for shared in (False, True)
}
# the paper's Table 2 (NDCG@10 / HR@10 / COV@10 on beauty) and Table 4 (NDCG@10)
PAPER = {
    "NoPE": "0.0316 / 0.0571 / 0.6302",
    "Classic": "0.0328 / 0.0627 / 0.5079",
    "RoPE": "0.0347 / 0.0650 / 0.6347",
    "CAPE": "0.0377 / 0.0670 / 0.6376",
    "Ours": "0.0394 / 0.0683 / 0.6201",
    "T-T per layer": "0.0322",
    "T-T shared": "0.0359",
    "T-F per layer": "0.0394",
    "T-F shared": "0.0378",
    "F-T per layer": "0.0351",
    "F-T shared": "0.0331",
}


def tag(name: str, dropout: float) -> str:
    """Name of a scheme's runs."""
    return f"{name}-{dropout}"


class KernelStudy(Study):
    """The same search for every scheme, then seeds, then kernels attached to trained models."""

    tuned: dict[str, float]

    def train(self, name: str, scheme: dict[str, Any], dropout: float, seed: int) -> None:
        """One run."""
        self.run(tag(name, dropout), {**scheme, "hidden_dropout_prob": dropout}, seed)

    def tune(self) -> None:
        """The dropout of every scheme, by validation."""
        found = {name: self.searched(name) for name in SCHEMES}
        self.tuned = {n: max(s, key=s.__getitem__) if s else SEARCH[0] for n, s in found.items()}

    def searched(self, name: str) -> dict[float, float]:
        """Validation NDCG@10 of the finished trials of a scheme, by dropout."""
        found = {p: self.finished(tag(name, p), SEEDS[:1]) for p in SEARCH}
        return {
            p: result(run)["best_valid"]["ndcg@10"]
            for p, runs in found.items()
            for run in runs.values()
        }

    def dropout(self, name: str) -> float:
        """Variants of the kernel take the kernel's."""
        return self.tuned[name if name in SCHEMES else "Ours"]

    def attach(self, name: str, seed: int) -> None:
        """The kernel attached to a trained scheme, only it fine-tuned (section 6.1)."""
        run = self.path(tag(f"{name}+kernel", self.dropout(name)), seed)
        if not (run / "result.json").exists():
            trained = self.path(tag(name, self.dropout(name)), seed)
            command = ["attach", trained, "kernel", "--run_dir", run]
            if (run / "checkpoint.pt").exists():
                command = ["run", "--resume", run]
            self.command(run, command)

    def row(self, name: str) -> dict[int, Path]:
        """The finished runs of a row, by seed."""
        return self.finished(tag(name, self.dropout(name.removesuffix("+kernel"))), SEEDS)


def tables(study: KernelStudy) -> str:
    """What the finished runs say."""
    paper = PAPER if study.dataset == "amazon-beauty" else {}
    done = {name: study.row(name) for name in [*SCHEMES, *VARIANTS]}
    lines = [
        "| scheme | search: dropout, valid NDCG@10 | seeds | valid NDCG@10 | NDCG@10 | HR@10 "
        "| COV@10 | paper | epochs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in SCHEMES:
        runs = done[name]
        if not runs:
            continue
        epochs = statistics.median(result(run)["epochs"] for run in runs.values())
        search = [
            f"**{p}** {value:.4f}" if p == study.dropout(name) else f"{p} {value:.4f}"
            for p, value in study.searched(name).items()
        ]
        cells = [name, ", ".join(search), f"{len(runs)}", score(runs, "ndcg@10", "best_valid")]
        cells += [score(runs, metric) for metric in ("ndcg@10", "hit@10", "itemcoverage@10")]
        cells += [paper.get(name, ""), f"{epochs:g}"]
        lines.append(f"| {' | '.join(cells)} |")
    if not done["Ours"]:
        return "\n".join(lines)
    length = gains(next(iter(done["Ours"].values())))[1]
    bins = {"1 to 5": length <= 5, "6 to 15": (length > 5) & (length <= 15), "over 15": length > 15}
    header = ["difference in NDCG@10, in 0.0001", "all targets"]
    header += [f"history {name} ({where.sum():,})" for name, where in bins.items()]
    lines += ["", f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    pairs = [("Ours", name) for name in SCHEMES if name != "Ours"]
    pairs += [("RoPE", "NoPE"), ("CAPE", "NoPE"), ("Classic", "NoPE")]
    for one, other in pairs:
        cells = [paired(done[one], done[other])]
        cells += [paired(done[one], done[other], where=where) for where in bins.values()]
        lines.append(f"| {one} - {other} | {' | '.join(cells)} |")
    attached = {name: study.row(f"{name}+kernel") for name in ATTACHED}
    if any(attached.values()):
        lines += ["", "| fine-tuned kernel only | seeds | NDCG@10 | HR@10 | COV@10 | - before |"]
        lines.append("|---|---|---|---|---|---|")
        for name, runs in attached.items():
            if not runs:
                continue
            cells = [score(runs, metric) for metric in ("ndcg@10", "hit@10", "itemcoverage@10")]
            cells.append(paired(runs, done[name]))
            lines.append(f"| {name} + kernel | {len(runs)} | {' | '.join(cells)} |")
    variants = {name: runs for name, runs in done.items() if name in VARIANTS and runs}
    if variants:
        lines += ["", "| variant | seeds | NDCG@10 | HR@10 | paper NDCG@10 | - Ours |"]
        lines.append("|---|---|---|---|---|---|")
        for name, runs in variants.items():
            cells = [f"{len(runs)}", score(runs, "ndcg@10"), score(runs, "hit@10")]
            cells += [paper.get(name, ""), paired(runs, done["Ours"])]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="ml-100k")
    parser.add_argument("--data_path", help="folder that holds the dataset's folder")
    parser.add_argument("--length", type=int, default=50)
    parser.add_argument("--runs", type=Path, default=ROOT / "saved" / "results-kernel-attention")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="of the schemes")
    parser.add_argument("--variant_seeds", type=int, default=len(SEEDS), help="of Table 4")
    parser.add_argument("--table", action="store_true", help="only write what is finished")
    given = parser.parse_args()
    preset = read_yaml(PRESET)
    protocol = {**shared_options(preset), **own_options(preset, "PosSASRec")}
    protocol |= {"MAX_ITEM_LIST_LENGTH": given.length, "show_progress": False}
    if given.data_path:
        protocol["data_path"] = given.data_path
    name = given.dataset if given.length == 50 else f"{given.dataset}-{given.length}"
    study = KernelStudy(given.dataset, given.runs / name, protocol, given.processes, given.threads)
    if not given.table:
        jobs = [(n, s, p, SEEDS[0]) for p in SEARCH for n, s in SCHEMES.items()]
        study.all(study.train, jobs)
    study.tune()
    plan = [(SCHEMES, given.seeds), (VARIANTS, given.variant_seeds)] if not given.table else []
    for rows, seeds in plan:
        some = SEEDS[:seeds]
        jobs = [(n, s, study.dropout(n), seed) for seed in some for n, s in rows.items()]
        study.all(study.train, jobs)
        if rows is SCHEMES:
            study.all(study.attach, [(name, seed) for seed in some for name in ATTACHED])
    replace_section(PAGE, study.dataset, tables(study))


if __name__ == "__main__":
    main()
