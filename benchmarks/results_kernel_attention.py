"""``make results-kernel``: the kernel attention paper's comparison (its Tables 2 and 4).

Every scheme runs on the same backbone, split and search: each dropout of ``SEARCH`` once, the best
on validation then with all seeds. Runs are kept and reused, interrupted ones resumed. Test ranks of
every target are kept too, so that schemes are compared target by target. Writes
``results/kernel_attention-<dataset>.md`` (a part of results/kernel_attention.md).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).parent.parent
SEEDS = [2020, 2021, 2022]
SEARCH = [0.3, 0.5]
PROTOCOL: dict[str, Any] = {
    "eval_args": {"split": {"GT": [0.95, 0.97]}},
    "metrics": ["NDCG", "Hit", "ItemCoverage"],
    "topk": [10],
    "valid_metric": "NDCG@10",
    "n_layers": 2,
    "n_heads": 1,
    "hidden_size": 64,
    "inner_size": 256,
    "norm": "pre",
    "embedding_scale": True,
    "attn_dropout_prob": 0.0,
    "learning_rate": 1e-3,
    "adam_betas": [0.9, 0.98],
    "train_batch_size": 128,
    "epochs": 40,
    "stopping_step": 5,
    "show_progress": False,
}
SCHEMES: dict[str, dict[str, Any]] = {
    "NoPE": {"position": ["nope"]},
    "Classic": {"position": ["learned"]},
    "RoPE": {"position": ["rope"]},
    "CAPE": {"position": ["cape"]},
    "Ours": {"position": ["kernel"]},
}
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

    def run(self, name: str, scheme: dict[str, Any], dropout: float, seed: int) -> Path:
        """Train, unless done; the run folder."""
        run = self.folder / f"{name.replace(' ', '-')}-{dropout}-{seed}"
        if (run / "result.json").exists():
            return run
        command = ["--resume", run]
        if not (run / "checkpoint.pt").exists():
            options = {
                **PROTOCOL,
                **scheme,
                "hidden_dropout_prob": dropout,
                "seed": seed,
                "MAX_ITEM_LIST_LENGTH": self.length,
            }
            if self.data_path:
                options["data_path"] = self.data_path
            file = run.with_suffix(".yaml")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(yaml.safe_dump(options))
            command = ["-m", "PosSASRec", "-d", self.dataset, "--config_files", file]
            command += ["--run_dir", run]
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
        return run

    def all(self, jobs: list[tuple[str, dict[str, Any], float, int]]) -> None:
        """Run jobs, a few processes at a time."""
        with ThreadPoolExecutor(self.processes) as pool:
            list(pool.map(lambda job: self.run(*job), jobs))

    def tune(self) -> None:
        """The dropout of every scheme, by validation, with the same trials for each."""
        self.all([(n, s, p, SEEDS[0]) for p in SEARCH for n, s in SCHEMES.items()])
        for name, scheme in SCHEMES.items():
            scores = {
                p: result(self.run(name, scheme, p, SEEDS[0]))["best_valid"]["ndcg@10"]
                for p in SEARCH
            }
            self.tuned[name] = max(scores, key=scores.__getitem__)

    def dropout(self, name: str) -> float:
        """Variants of the kernel take the kernel's."""
        return self.tuned[name if name in SCHEMES else "Ours"]

    def runs(self, name: str, seeds: list[int]) -> list[Path]:
        """Finished runs of a row."""
        scheme = {**SCHEMES, **VARIANTS}[name]
        return [self.run(name, scheme, self.dropout(name), seed) for seed in seeds]


def result(run: Path) -> dict[str, Any]:
    """result.json of a run."""
    return json.loads((run / "result.json").read_text())


def gains(run: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """User, position of the target (from 0) and NDCG@10 of every test target of a run."""
    file = run / "test_ranks.npz"
    if not file.exists():
        import torch

        import recbole_pos

        made, users, ranks, places = recbole_pos.load(run), [], [], []
        for batch in made.loaders["test"]:
            rows, _, _, target = batch
            with torch.inference_mode():
                scores = made.model.full_sort_predict(rows)
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


def main() -> None:
    """Run what is missing, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="ml-100k")
    parser.add_argument("--data_path", help="folder that holds the dataset's folder")
    parser.add_argument("--length", type=int, default=50)
    parser.add_argument("--runs", type=Path, default=ROOT / "saved" / "results-kernel-attention")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    given = parser.parse_args()
    study = Study(
        given.dataset,
        given.length,
        given.runs / given.dataset,
        given.data_path,
        given.processes,
        given.threads,
    )
    study.tune()
    study.all([(n, s, study.dropout(n), seed) for seed in SEEDS for n, s in SCHEMES.items()])
    study.all([(n, s, study.dropout(n), seed) for seed in SEEDS for n, s in VARIANTS.items()])


if __name__ == "__main__":
    main()
