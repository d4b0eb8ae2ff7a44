"""Training speed against other libraries: real targets per second of PosSASRec and of its peers.

``make bench-peers``, or ``python benchmarks/peers.py`` where each peer has a virtual environment.
Every run is a process of its own; ours and the peer's alternate, so that a slow spell of the
machine meets both. Each side trains on the same events, and a worker stops if its epoch does not
hold exactly the targets that were counted here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from data import count_targets, ml_100k, short_histories, training_events
from peer_workers.common import Job

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Case:
    """A data set, a window length and the ratio that we want to reach there."""

    title: str
    table: Callable[[], pd.DataFrame]
    length: int
    goal: float


@dataclass(frozen=True)
class Peer:
    """A library to compare with: the module that runs it, in which environment."""

    title: str
    module: str
    venv: str
    flags: tuple[str, ...] = ()


@dataclass
class Pair:
    """The runs of one case with one peer."""

    case: Case
    peer: Peer
    job: Job
    ours: list[dict[str, Any]] = field(default_factory=list)
    theirs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def speeds(self) -> tuple[float, float]:
        """Best run of each side: what disturbs a run only ever makes it slower."""
        return tuple(max(r["targets_per_second"] for r in s) for s in (self.ours, self.theirs))

    @property
    def ratio(self) -> float:
        ours, theirs = self.speeds
        return ours / theirs

    @property
    def ratios(self) -> list[float]:
        """Of each turn: ours to the peer's run that followed it."""
        turns = zip(self.ours, self.theirs, strict=True)
        return [ours["targets_per_second"] / peer["targets_per_second"] for ours, peer in turns]


CASES = {
    "ml-100k-50": Case("ml-100k, L=50", ml_100k, 50, 2.0),
    "ml-100k-200": Case("ml-100k, L=200", ml_100k, 200, 3.0),
    "short-50": Case("short histories, L=50", partial(short_histories, 0), 50, 10.0),
}
PEERS = {
    "rectools": Peer("RecTools SASRecModel", "rectools_worker", "rectools"),
    "replay": Peer("RePlay SasRec", "replay_worker", "replay"),
    "replay-trimmed": Peer("RePlay SasRec, trimmed", "replay_worker", "replay", ("--trim",)),
}
NOTES = """\
- Users' last two events are held out, and what is left must be two events or more. Each user gives
  one sequence, its last L + 1 training events; its targets are all of them but the first. Targets
  of padding do not count.
- Not timed: imports, reading data, building the model, validation (not used), and the first
  epoch (or its first {warmup:g} s). Timed: whole steps over at least one epoch's worth of targets
  and at least {minimum:g} s{maximum}, with making batches, forward, backward and optimiser.
- Dropout is {dropout:g}, on attention weights {attention:g}. Peers tie the latter to the former;
  where the two differ here, it was set on their attention modules after they were built.
- RecTools' SASRec has no option for the inner size of its feed-forward, which is d = {hidden};
  ours and RePlay's have {inner}. Both peers use ReLU there, ours GELU.
- RePlay also learns the first item of a sequence shorter than L + 1, from a position of padding.
  That is a target without a history, so it is not counted, on any side.
- Both peers run encoder and logits over padding up to L. "Trimmed" is RePlay with its optional
  TargetAwareAdaptiveTrimTransform, which cuts a batch to its longest sequence; its default training
  transforms, which the other line uses, do not have it.
"""


def worker(python: Path, module: str, file: Path, flags: tuple[str, ...], job: Job) -> dict:
    """Run one worker to its end; its result."""
    environment = os.environ | {name: str(job.threads) for name in THREAD_VARIABLES}
    environment |= {"PYTHONPATH": str(ROOT)}
    if job.accelerator == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": ""}
    command = [str(python), "-m", f"peer_workers.{module}", str(file), *flags]
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(command)}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def find_python(venv: Path, name: str) -> Path:
    """The interpreter of a peer's environment."""
    python = venv.absolute() / "bin" / "python"
    if not python.exists():
        sys.exit(
            f"{venv} is no virtual environment; make it with\n"
            f"  python -m venv {venv}\n"
            f"  {venv}/bin/pip install torch==2.13.0\n"
            f"  {venv}/bin/pip install -r benchmarks/requirements-peers-{name}.txt"
        )
    return python


def run_pair(pair: Pair, job_file: Path, python: Path, repeats: int) -> None:
    """Ours, peer, ours, peer, ... for one case."""
    job = pair.job
    for turn in range(repeats):
        pair.ours.append(worker(Path(sys.executable), "ours_worker", job_file, (), job))
        pair.theirs.append(worker(python, pair.peer.module, job_file, pair.peer.flags, job))
        ours, theirs = pair.ours[-1], pair.theirs[-1]
        if ours["items"] != theirs["items"]:
            sys.exit(f"{ours['items']} items here, {theirs['items']} in {pair.peer.title}")
        print(
            f"{pair.case.title}, {pair.peer.title}, run {turn + 1}: "
            f"ours {ours['targets_per_second']:,.0f}, peer {theirs['targets_per_second']:,.0f}",
            flush=True,
        )


def make_job(case: Case, args: argparse.Namespace, folder: Path) -> tuple[Job, Path]:
    """Training events and settings of a case, written for the workers."""
    events = training_events(case.table(), case.length)
    if args.users:
        events = events[events["user_id"].isin(events["user_id"].unique()[: args.users])]
    events_file, job_file = folder / "events.csv", folder / "job.json"
    events.to_csv(events_file, index=False)
    options = {name: getattr(args, name) for name in vars(args) if name in Job.__annotations__}
    job = Job(
        events=str(events_file),
        length=case.length,
        targets=count_targets(events, case.length),
        **options,
    )
    job.write(job_file)
    return job, job_file


def spread(runs: list[dict[str, Any]]) -> str:
    """The best run, and between which two all of them lie."""
    speeds = [run["targets_per_second"] for run in runs]
    return f"{max(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})"


def table(pairs: list[Pair]) -> str:
    """The result: one line per case and peer."""
    lines = [
        "| data | items | targets an epoch | peer | ours, targets/s: best (least to most) | theirs "
        "| ratio: of the best (of single turns) | goal |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: | --- |",
    ]
    for pair in pairs:
        ours, theirs = (spread(side) for side in (pair.ours, pair.theirs))
        ratio = f"{pair.ratio:.2f} ({min(pair.ratios):.2f} to {max(pair.ratios):.2f})"
        met = "met" if pair.ratio >= pair.case.goal else "**not met**"
        lines.append(
            f"| {pair.case.title} | {pair.ours[0]['items']:,} | {pair.job.targets:,} "
            f"| {pair.peer.title} | {ours} | {theirs} | {ratio} "
            f"| {pair.case.goal:g}: {met} |"
        )
    return "\n".join(lines)


def all_runs(pairs: list[Pair]) -> str:
    """Every single run, so that the spread can be seen."""
    lines = [
        "| data | side | parameters | targets/s of each run | timed |",
        "| --- | --- | ---: | --- | --- |",
    ]
    for pair in pairs:
        for title, runs in (("ours", pair.ours), (pair.peer.title, pair.theirs)):
            speeds = ", ".join(f"{r['targets_per_second']:,.0f}" for r in runs)
            timed = ", ".join(f"{r['epochs']:.2f} epochs in {r['seconds']:.0f} s" for r in runs)
            lines.append(
                f"| {pair.case.title} | {title} | {runs[0]['parameters']:,} | {speeds} | {timed} |"
            )
    return "\n".join(lines)


def cpu_name() -> str:
    """The processor as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def document(pairs: list[Pair], args: argparse.Namespace, load: float) -> str:
    """The whole results file."""
    job = pairs[0].job
    packages: dict[str, str] = {}
    for pair in pairs:
        for title, run in (("ours", pair.ours[0]), (pair.peer.title, pair.theirs[0])):
            names = {"python": run["python"], **run["versions"]}
            packages[title] = ", ".join(f"{name} {number}" for name, number in names.items())
    notes = NOTES.format(
        warmup=job.warmup_seconds,
        minimum=job.min_seconds,
        maximum=f", at most {job.max_seconds:g} s" if job.max_seconds < 1e9 else "",
        dropout=job.dropout,
        attention=job.attention_dropout,
        hidden=job.hidden_size,
        inner=job.inner_size,
    )
    settings = (
        f"d = {job.hidden_size}, {job.n_layers} layers, {job.n_heads} heads, feed-forward "
        f"{job.inner_size} (see below), dropout {job.dropout:g}, full softmax cross-entropy, "
        f"{job.batch_size} sequences a batch, Adam with learning rate {job.learning_rate:g}, "
        f"float32, {job.threads} threads."
    )
    users = f"\n**Only the first {args.users} users: not a result.**\n" if args.users else ""
    versions = "\n".join(f"- {title}: {names}" for title, names in packages.items())
    command = shlex.join(["python", "benchmarks/peers.py", *sys.argv[1:]])
    return (
        f"# Training speed against other libraries\n{users}\n"
        f"Real targets per second in training, best of {args.repeats} runs of each side, which "
        f"alternated, and the spread of them.\n\n{table(pairs)}\n\n"
        f"Command: `{command}`\n\nSettings: {settings}\n\n"
        f"Machine: {cpu_name()}, {os.cpu_count()} cores; load {load:.2f} before the first run.\n\n"
        f"{versions}\n\n## What was measured\n\n{notes}\n## All runs\n\n{all_runs(pairs)}\n"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--venv-rectools", type=Path, default=Path(".venv-rectools"))
    parser.add_argument("--venv-replay", type=Path, default=Path(".venv-replay"))
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side")
    parser.add_argument("--threads", type=int, default=Job.threads)
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default=Job.accelerator)
    parser.add_argument("--dropout", type=float, default=Job.dropout)
    parser.add_argument("--attention-dropout", type=float, default=Job.attention_dropout)
    parser.add_argument("--inner-size", type=int, default=Job.inner_size, help="not RecTools'")
    parser.add_argument("--warmup-seconds", type=float, default=Job.warmup_seconds)
    parser.add_argument("--min-seconds", type=float, default=Job.min_seconds)
    parser.add_argument(
        "--max-seconds", type=float, default=Job.max_seconds, help="of a timed part"
    )
    parser.add_argument("--users", type=int, help="only the first so many users, to try it out")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "speed_peers.md")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error("--repeats must be at least 1")
    return args


def main() -> None:
    args = parse()
    load = os.getloadavg()[0]
    if load > 0.5:
        print(
            f"the machine is busy (load {load:.2f}); expect lower and noisier numbers", flush=True
        )
    names = {PEERS[name].venv for name in args.peers}
    pythons = {name: find_python(getattr(args, f"venv_{name}"), name) for name in sorted(names)}
    pairs = []
    for case in (CASES[name] for name in args.cases):
        with tempfile.TemporaryDirectory() as folder:
            job, job_file = make_job(case, args, Path(folder))
            for peer in (PEERS[name] for name in args.peers):
                pairs.append(Pair(case, peer, job))
                run_pair(pairs[-1], job_file, pythons[peer.venv], args.repeats)
    print(table(pairs))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(document(pairs, args, load))
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
