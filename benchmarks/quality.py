"""Seconds of training until a model is as good as its peers': PosSASRec, RecTools and RePlay.

``make bench-quality``. The sides, data and settings of ``peers.py``; after every epoch each user's
next item is ranked among all, by the same code for all sides, while the clock stands. A side ends
after some epochs without improvement. The level is one that every side reaches with every seed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from data import count_targets, next_events, training_events
from peer_workers.common import Job
from peers import CASES, PEERS, ROOT, Case, cpu_name, find_python, worker

SHARE = 0.98  # of what the worst run ends with: the level that all of them reach
OURS = "PosSASRec"


@dataclass
class Side:
    """A library and its runs, one for each seed."""

    title: str
    runs: list[dict[str, Any]] = field(default_factory=list)

    def best(self) -> list[float]:
        """NDCG@10 of the best epoch of every run."""
        return [max(value for _, value in run["points"]) for run in self.runs]

    def reached(self, level: float) -> list[tuple[float, int]]:
        """Seconds and epochs of every run until then."""
        found = []
        for run in self.runs:
            points = enumerate(run["points"], 1)
            found.append(next((at, n) for n, (at, value) in points if value >= level))
        return found


def seconds(values: list[float]) -> str:
    """The median, and between which two all lie."""
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def table(sides: list[Side]) -> str:
    """A line for each side; ratios are of runs with the same seed."""
    level = SHARE * min(min(side.best()) for side in sides)
    ours = [at for at, _ in sides[0].reached(level)]
    lines = [
        f"Level: NDCG@10 of {level:.4f}, {SHARE:.0%} of what the worst run ends with.",
        "",
        "| side | s of training to the level: median (all) | times ours | epochs to it | "
        "an epoch, s | best NDCG@10: median (all) | epochs to that |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for side in sides:
        reached, best = side.reached(level), side.best()
        slower = [at / own for (at, _), own in zip(reached, ours, strict=True)]
        epoch = statistics.median(run["points"][-1][0] / len(run["points"]) for run in side.runs)
        last = [
            1 + max(range(len(run["points"])), key=lambda n, run=run: run["points"][n][1])
            for run in side.runs
        ]
        lines.append(
            f"| {side.title} | {seconds([at for at, _ in reached])} | {seconds(slower)} "
            f"| {', '.join(str(n) for _, n in reached)} | {epoch:.2f} "
            f"| {statistics.median(best):.4f} ({min(best):.4f} to {max(best):.4f}) "
            f"| {', '.join(map(str, last))} |"
        )
    return "\n".join(lines)


def run_case(case: Case, args: argparse.Namespace, pythons: dict[str, Path]) -> list[Side]:
    """All sides in turns, a seed after the other."""
    events = training_events(case.table(), case.length)
    names = [None, *args.peers]
    sides = [Side(OURS if name is None else PEERS[name].title) for name in names]
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / name for name in ("events.csv", "next.csv", "job.json")}
        events.to_csv(files["events.csv"], index=False)
        next_events(case.table(), events).to_csv(files["next.csv"], index=False)
        job = Job(
            events=str(files["events.csv"]),
            held_out=str(files["next.csv"]),
            length=case.length,
            targets=count_targets(events, case.length),
            threads=args.threads,
            accelerator=args.accelerator,
            max_seconds=args.max_seconds,
            patience=args.patience,
        )
        for seed in range(args.seeds):
            job = replace(job, seed=job.seed + seed)
            job.write(files["job.json"])
            for name, side in zip(names, sides, strict=True):
                if name is None:
                    run = worker(Path(sys.executable), "ours_worker", files["job.json"], (), job)
                else:
                    peer = PEERS[name]
                    python = pythons[peer.venv]
                    run = worker(python, peer.module, files["job.json"], peer.flags, job)
                side.runs.append(run)
                at, value = max(run["points"], key=lambda point: point[1])
                print(f"{case.title}, {side.title}: {value:.4f} after {at:.1f} s", flush=True)
    return sides


def document(found: dict[str, list[Side]], args: argparse.Namespace, load: float) -> str:
    """The page."""
    command = shlex.join(["python", "benchmarks/quality.py", *sys.argv[1:]])
    sides = next(iter(found.values()))
    versions = "\n".join(
        f"- {side.title}: "
        + ", ".join(f"{name} {number}" for name, number in side.runs[0]["versions"].items())
        for side in sides
    )
    tables = "\n\n".join(f"## {title}\n\n{table(sides)}" for title, sides in found.items())
    return f"""\
# Time to the same quality

Seconds of training until a level that all sides reach: data, sides and settings
of [training speed](speed_peers.md), {args.seeds} seeds, in turns. Time runs from the first
step on and stands while an epoch is looked at; imports, reading and building are not in it. All
items are ranked, by the same code for all sides. A side ends after {args.patience} epochs without
gain or {args.max_seconds:g} s. The level is below what every run ends with, so that no side is
asked for what it does not reach.

{tables}

Command: `{command}`

d = {Job.hidden_size}, {Job.n_layers} layers, dropout {Job.dropout:g}, full softmax,
{Job.batch_size} sequences a batch, Adam with {Job.learning_rate:g}, float32, {args.threads}
thread(s), {args.accelerator}. Nothing is tuned for any side; RecTools' feed-forward is
{Job.hidden_size} wide, the others' {Job.inner_size}. {cpu_name()}, {os.cpu_count()} cores; load
{load:.2f} before the first run.

{versions}
"""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["ml-100k-50"])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=["rectools", "replay"])
    parser.add_argument("--venv-rectools", type=Path, default=Path(".venv-rectools"))
    parser.add_argument("--venv-replay", type=Path, default=Path(".venv-replay"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--patience", type=int, default=20, help="epochs without improvement")
    parser.add_argument("--max-seconds", type=float, default=600.0, help="of training, a run")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "quality_peers.md")
    return parser.parse_args()


def main() -> None:
    args, load = parse(), os.getloadavg()[0]
    pythons = {
        name: find_python(getattr(args, f"venv_{name}"), name)
        for name in sorted({PEERS[name].venv for name in args.peers})
    }
    cases = [CASES[name] for name in args.cases]
    found = {case.title: run_case(case, args, pythons) for case in cases}
    text = document(found, args, load)
    args.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
