"""``make results-kernel``: the kernel attention paper's comparison (its Tables 2 and 4).

Every scheme runs on the same backbone, split and search: each dropout of ``SEARCH`` once, the best
on validation then with all seeds. Runs are kept and reused, interrupted ones resumed. Test ranks of
every target are kept too, so that schemes are compared target by target. Writes the part of
``results/kernel_attention.md`` between the marks of the dataset; ``--table`` only does that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "results" / "kernel_attention.md"
SEEDS = [2020, 2021, 2022]
SEARCH = [0.3, 0.2]
PRESET = "kernel_attention/beauty.yaml"  # what all runs have in common
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


@dataclass
class Study:
    """The runs on one dataset."""

    dataset: str
    length: int
    folder: Path
    data_path: str | None
    processes: int
    threads: int
    tuned: dict[str, float] = field(default_factory=dict)

    def path(self, name: str, dropout: float, seed: int) -> Path:
        """Where a run is kept."""
        return self.folder / f"{name.replace(' ', '-')}-{dropout}-{seed}"

    def run(self, name: str, scheme: dict[str, Any], dropout: float, seed: int) -> Path:
        """Train, unless done; the run folder."""
        run = self.path(name, dropout, seed)
        if (run / "result.json").exists():
            return run
        command = ["--resume", run]
        if not (run / "checkpoint.pt").exists():
            options = {
                **scheme,
                "hidden_dropout_prob": dropout,
                "seed": seed,
                "MAX_ITEM_LIST_LENGTH": self.length,
                "show_progress": False,
            }
            if self.data_path:
                options["data_path"] = self.data_path
            file = run.with_name(f"{run.name}.yaml")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(yaml.safe_dump(options))
            command = ["-m", "PosSASRec", "-d", self.dataset, "--config_files", PRESET, file]
            command += ["--run_dir", run]
        self.command(run, command)
        return run

    def command(self, run: Path, command: list[Any]) -> None:
        """One call of the command line, on this study's share of the cores."""
        threads = {"OMP_NUM_THREADS": str(self.threads), "MKL_NUM_THREADS": str(self.threads)}
        done = subprocess.run(
            [sys.executable, ROOT / "run_recbole_pos.py", *map(str, command)],
            env={**os.environ, **threads},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{run}: {done.stderr}")
        result = json.loads((run / "result.json").read_text())
        valid = result["best_valid"]["ndcg@10"]
        print(f"{run.name}: valid {valid:.4f}", result["test"], flush=True)

    def all(self, jobs: list[tuple[str, dict[str, Any], float, int]]) -> None:
        """Run jobs, a few processes at a time."""
        with ThreadPoolExecutor(self.processes) as pool:
            list(pool.map(lambda job: self.run(*job), jobs))

    def attach_all(self, seeds: list[int]) -> None:
        """The kernel attached to each of ``ATTACHED``."""
        jobs = [(name, seed) for seed in seeds for name in ATTACHED]
        with ThreadPoolExecutor(self.processes) as pool:
            list(pool.map(lambda job: self.attach(*job), jobs))

    def search(self) -> None:
        """The same trials for every scheme."""
        self.all([(n, s, p, SEEDS[0]) for p in SEARCH for n, s in SCHEMES.items()])

    def tune(self) -> None:
        """The dropout of every scheme, by validation."""
        for name in SCHEMES:
            scores = self.searched(name)
            self.tuned[name] = max(scores, key=scores.__getitem__) if scores else SEARCH[0]

    def searched(self, name: str) -> dict[float, float]:
        """Validation NDCG@10 of the finished trials of a scheme, by dropout."""
        runs = {p: self.path(name, p, SEEDS[0]) for p in SEARCH}
        done = {p: run for p, run in runs.items() if (run / "result.json").exists()}
        return {p: result(run)["best_valid"]["ndcg@10"] for p, run in done.items()}

    def dropout(self, name: str) -> float:
        """Variants of the kernel take the kernel's."""
        return self.tuned[name if name in SCHEMES else "Ours"]

    def attach(self, name: str, seed: int) -> Path:
        """The kernel attached to a trained scheme, only it fine-tuned (section 6.1)."""
        run = self.path(f"{name}+kernel", self.dropout(name), seed)
        if not (run / "result.json").exists():
            trained = self.path(name, self.dropout(name), seed)
            command = ["attach", trained, "kernel", "--run_dir", run]
            if (run / "checkpoint.pt").exists():
                command = ["run", "--resume", run]
            self.command(run, command)
        return run

    def finished(self, name: str) -> dict[int, Path]:
        """The runs of a row that are done, by seed."""
        dropout = self.dropout(name.removesuffix("+kernel"))
        folders = {seed: self.path(name, dropout, seed) for seed in SEEDS}
        return {s: folder for s, folder in folders.items() if (folder / "result.json").exists()}


def result(run: Path) -> dict[str, Any]:
    """result.json of a run."""
    return json.loads((run / "result.json").read_text())


@cache
def gains(run: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """User, length of the history (up to the window) and NDCG@10 of every test target of a run."""
    file = run / "test_ranks.npz"
    if not file.exists():
        import torch

        import recbole_pos

        made, users, ranks, places = recbole_pos.load(run), [], [], []
        for batch in made.loaders["test"]:
            rows, _, _, target = batch
            with torch.no_grad():
                scores = made.model.full_sort_predict(rows.to(made.model.device)).cpu()
            scores[:, 0] = -torch.inf
            own = scores.gather(1, target[:, None])
            ranks.append((scores > own).sum(1))
            users.append(rows[made.dataset.uid_field])
            places.append(rows[made.dataset.item_list_length_field])
        columns = {"user": users, "rank": ranks, "length": places}
        np.savez(file, **{name: torch.cat(parts).numpy() for name, parts in columns.items()})
    found = np.load(file)
    rank = found["rank"]
    ndcg = np.where(rank < 10, 1 / np.log2(rank + 2.0), 0.0)
    assert abs(ndcg.mean() - result(run)["test"]["ndcg@10"]) < 2e-4, run  # ties and rounding
    return found["user"], found["length"], ndcg


def difference(
    runs: list[Path], others: list[Path], where: np.ndarray | None = None, rounds: int = 2000
) -> tuple[float, float, float]:
    """Mean paired difference in NDCG@10 and its 95% interval over users and seeds (bootstrap)."""
    rng = np.random.default_rng(0)
    user, _, _ = gains(runs[0])
    delta = np.stack([gains(a)[2] - gains(b)[2] for a, b in zip(runs, others, strict=True)])
    keep = np.ones(len(user), dtype=bool) if where is None else where
    _, user = np.unique(user[keep], return_inverse=True)
    total = np.stack([np.bincount(user, row[keep]) for row in delta])  # [seeds, users]
    count = np.bincount(user)
    seeds, users = total.shape
    drawn = []
    for _ in range(rounds):
        u = rng.integers(users, size=users)
        s = rng.integers(seeds, size=seeds)
        drawn.append(total[s][:, u].mean(0).sum() / count[u].sum())
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(delta[:, keep].mean()), float(low), float(high)


def score(runs: dict[int, Path], metric: str, phase: str = "test") -> str:
    """Mean and standard deviation over seeds."""
    values = [result(run)[phase][metric] for run in runs.values()]
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{spread}"


def paired(runs: dict[int, Path], others: dict[int, Path], **given: Any) -> str:
    """Difference over the seeds that both have, in units of 0.0001, with its interval."""
    seeds = sorted(set(runs) & set(others))
    if not seeds or runs == others:
        return ""
    mean, low, high = difference([runs[s] for s in seeds], [others[s] for s in seeds], **given)
    mark = "" if low <= 0 <= high else " *"
    return f"{1e4 * mean:+.0f} [{1e4 * low:+.0f}, {1e4 * high:+.0f}]{mark}"


def tables(study: Study) -> str:
    """What the finished runs say."""
    paper = PAPER if study.dataset == "amazon-beauty" else {}
    done = {name: study.finished(name) for name in [*SCHEMES, *VARIANTS]}
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
    attached = {name: study.finished(f"{name}+kernel") for name in ATTACHED}
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


def write(study: Study) -> None:
    """Replace the dataset's part of the results page."""
    begin, end = (f"<!-- {mark} {study.dataset} -->" for mark in ("begin", "end"))
    page = PAGE.read_text()
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    PAGE.write_text(f"{before}{begin}\n{tables(study)}\n{end}{after}")
    print(tables(study))


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
    study = Study(
        given.dataset,
        given.length,
        given.runs / (given.dataset if given.length == 50 else f"{given.dataset}-{given.length}"),
        given.data_path,
        given.processes,
        given.threads,
    )
    if not given.table:
        study.search()
    study.tune()
    plan = [(SCHEMES, given.seeds), (VARIANTS, given.variant_seeds)] if not given.table else []
    for rows, seeds in plan:
        jobs = [(n, s, study.dropout(n), seed) for seed in SEEDS[:seeds] for n, s in rows.items()]
        study.all(jobs)
        if rows is SCHEMES:
            study.attach_all(SEEDS[:seeds])
    write(study)


if __name__ == "__main__":
    main()
