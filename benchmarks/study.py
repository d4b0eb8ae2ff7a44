"""Runs of a comparison: kept, reused, resumed, and compared target by target."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from matplotlib.figure import Figure

from recbole_pos.config.presets import FOR, parts_for

ROOT = Path(__file__).parent.parent


def shared_options(preset: dict[str, Any]) -> dict[str, Any]:
    """What a preset has for every row of its comparison."""
    return {key: value for key, value in preset.items() if key not in ("model", FOR)}


def own_options(preset: dict[str, Any], model: str) -> dict[str, Any]:
    """What a preset has for a model alone."""
    _, *own = parts_for(preset, {model}, "preset")
    return {key: value for _, options in own for key, value in options.items()}


@dataclass
class Study:
    """Runs of the command line on one dataset, under one protocol.

    Attributes:
        dataset: its name.
        folder: where runs are kept, each as <tag>-<seed>.
        protocol: configuration of every run.
        processes: how many runs at a time.
        threads: of each.
    """

    dataset: str
    folder: Path
    protocol: dict[str, Any]
    processes: int
    threads: int

    def path(self, tag: str, seed: int) -> Path:
        """Where a run is kept."""
        return self.folder / f"{tag.replace(' ', '-')}-{seed}"

    def run(self, tag: str, options: dict[str, Any], seed: int) -> Path:
        """Train PosSASRec (or the options' model), unless done; the run folder."""
        run = self.path(tag, seed)
        file = run.with_name(f"{run.name}.yaml")
        given = {"model": "PosSASRec", **self.protocol, **options, "seed": seed}
        if file.exists() and yaml.safe_load(file.read_text()) != yaml.safe_load(yaml.dump(given)):
            raise SystemExit(f"{run} was made with other options, see {file}; move it away")
        if (run / "result.json").exists():
            return run
        command = ["--resume", run]
        if not (run / "checkpoint.pt").exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(yaml.safe_dump(given))
            command = ["-m", given["model"], "-d", self.dataset]
            command += ["--config_files", file, "--run_dir", run]
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
        found = result(run)
        print(run.name, "valid", found["best_valid"], "test", found["test"], flush=True)

    def all(self, call: Callable[..., Any], jobs: Iterable[tuple]) -> None:
        """``call(*job)`` for every job, a few at a time."""
        with ThreadPoolExecutor(self.processes) as pool:
            list(pool.map(lambda job: call(*job), jobs))

    def finished(self, tag: str, seeds: Iterable[int]) -> dict[int, Path]:
        """The runs of a tag that are done, by seed."""
        folders = {seed: self.path(tag, seed) for seed in seeds}
        return {s: folder for s, folder in folders.items() if (folder / "result.json").exists()}


def result(run: Path) -> dict[str, Any]:
    """result.json of a run."""
    return json.loads((run / "result.json").read_text())


@cache
def gains(run: Path, k: int = 10) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """User, length of the history (up to the window) and NDCG@k of every test target of a run."""
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
    ndcg = np.where(rank < k, 1 / np.log2(rank + 2.0), 0.0)
    assert abs(ndcg.mean() - result(run)["test"][f"ndcg@{k}"]) < 2e-4, run  # ties and rounding
    return found["user"], found["length"], ndcg


def difference(
    runs: list[Path],
    others: list[Path],
    where: np.ndarray | None = None,
    k: int = 10,
    rounds: int = 2000,
) -> tuple[float, float, float]:
    """Mean paired difference in NDCG@k and its 95% interval over users and seeds (bootstrap)."""
    rng = np.random.default_rng(0)
    user, _, _ = gains(runs[0], k)
    delta = np.stack([gains(a, k)[2] - gains(b, k)[2] for a, b in zip(runs, others, strict=True)])
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


def score(runs: dict[int, Path], metric: str, phase: str = "test", percent: bool = False) -> str:
    """Mean and standard deviation over seeds, to 4 decimals of 1 or 2 of a percent."""
    scale, digits = (100, 2) if percent else (1, 4)
    values = [scale * result(run)[phase][metric] for run in runs.values()]
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def paired(runs: dict[int, Path], others: dict[int, Path], **given: Any) -> str:
    """Difference over the seeds that both have, in units of 0.0001, with its interval."""
    seeds = sorted(set(runs) & set(others))
    if not seeds or runs == others:
        return ""
    mean, low, high = difference([runs[s] for s in seeds], [others[s] for s in seeds], **given)
    mark = "" if low <= 0 <= high else " *"
    return f"{1e4 * mean:+.0f} [{1e4 * low:+.0f}, {1e4 * high:+.0f}]{mark}"


def draw_curves(runs: dict[str, Path], metric: str, file: Path) -> None:
    """Validation metric by epoch, a line for each run."""
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    panel = figure.subplots()
    for name, run in runs.items():
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        points = [(line["epoch"] + 1, line["valid"][metric]) for line in lines if line["valid"]]
        panel.plot(*zip(*points, strict=True), label=name)
    panel.set(xlabel="epoch", ylabel=f"{metric.upper()}, validation")
    panel.grid(alpha=0.3)
    panel.legend(frameon=False, fontsize=9)
    figure.savefig(file, dpi=120)


def section(page: Path, mark: str) -> tuple[str, str, str]:
    """A page before the begin mark, between the marks, and after the end mark."""
    begin, end = (f"<!-- {side} {mark} -->" for side in ("begin", "end"))
    before, _, rest = page.read_text().partition(begin)
    inside, _, after = rest.partition(end)
    return before, inside.strip(), after


def written_rows(page: Path, mark: str) -> dict[str, dict[str, str]]:
    """Lines of a section's tables by title (the first head) and name (the first cell)."""
    found: dict[str, dict[str, str]] = {}
    for block in section(page, mark)[1].split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("| ")]
        names = [line.split(" | ")[0].removeprefix("| ") for line in lines]
        if lines:
            found[names[0]] = dict(zip(names[1:], lines[1:], strict=True))
    return found


def replace_section(page: Path, mark: str, text: str) -> None:
    """Put text between the begin and end marks of a page."""
    begin, end = (f"<!-- {side} {mark} -->" for side in ("begin", "end"))
    before, _, after = section(page, mark)
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")
    print(text)
