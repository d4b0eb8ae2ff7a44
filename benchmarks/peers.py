"""Training speed against other libraries: real targets per second of PosSASRec and of its peers.

``make bench-peers``, or ``python benchmarks/peers.py`` where each peer has a virtual environment.
Every run is a process of its own; the sides alternate, so that a slow spell of the machine meets
all of them. Each side trains on the same interactions, and a worker stops if its epoch does not
hold exactly the targets that were counted here. Writes ``results/speed_peers.md``: of each dataset
and loss the peer with the least ratio; all are in ``results/tables/``.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from data import count_targets, long_histories, ml_100k, short_histories, training_events
from page import HERE, RESULTS, in_turns, replace_section, table
from peer_workers.common import Job

Runs = list[dict[str, Any]]
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Case:
    """A dataset, a window length and the goal of the ratio there."""

    title: str
    table: Callable[[], pd.DataFrame]
    length: int
    goal: float


@dataclass(frozen=True)
class Side:
    """A library: the module that runs it, in which environment (ours has none).

    ``settings`` are changes of the job, which our side then has too.
    """

    title: str
    module: str
    venv: str = ""
    flags: tuple[str, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()


CASES = {
    "ml-100k-50": Case("ml-100k, L=50", ml_100k, 50, 2.0),
    "ml-100k-200": Case("ml-100k, L=200", ml_100k, 200, 2.0),
    "short-50": Case("short histories, L=50", short_histories, 50, 3.0),
    "long-200": Case("long histories, L=200", long_histories, 200, 2.0),
}
OURS = Side("PosSASRec", "ours_worker")
SAMPLED = (("loss", "sampled_softmax"), ("negatives", 256))
RELU = (("activation", "relu"),)  # what the side has
REPLAY, FLAT = ("replay_worker", "replay"), ("rectools_flat_worker", "rectools")
TRIMMED = "RePlay SasRec, trimmed"
PEERS = {
    "rectools-flat": Side("RecTools FlatSASRecNet", *FLAT),
    "replay-trimmed": Side(TRIMMED, *REPLAY, settings=RELU),
    **{
        f"replay-bucket-{size}": Side(
            f"{TRIMMED}, buckets of {size}", *REPLAY, ("--bucket", str(size)), settings=RELU
        )
        for size in (8, 32, 64)
    },
    "rectools-sampled": Side("RecTools FlatSASRecNet, 256 negatives", *FLAT, settings=SAMPLED),
    "replay-sampled": Side(f"{TRIMMED}, 256 negatives", *REPLAY, settings=RELU + SAMPLED),
    "rechub": Side(
        "torch-rechub SASRec, 1 negative",
        "rechub_worker",
        "rechub",
        settings=(*RELU, ("loss", "bce"), ("negatives", 1), ("inner_size", 64)),
    ),
}


def run_worker(side: Side, job: Job, folder: Path, pythons: Mapping[str, Path]) -> dict[str, Any]:
    """Run one side to its end, and return its result."""
    file = folder / "job.json"
    job.write(file)
    environment = os.environ | {name: str(job.threads) for name in THREAD_VARIABLES}
    environment |= {"PYTHONPATH": str(HERE.parent), "CUDA_VISIBLE_DEVICES": ""}
    python = str(pythons[side.venv])
    command = [python, "-m", f"peer_workers.{side.module}", str(file), *side.flags]
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(command)}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def find_pythons(given: argparse.Namespace) -> dict[str, Path]:
    """Return the interpreter of each peer's environment, and ours."""
    pythons = {"": Path(sys.executable)}
    for name in sorted({PEERS[peer].venv for peer in given.peers}):
        venv = getattr(given, f"venv_{name}")
        pythons[name] = venv.absolute() / "bin" / "python"
        if not pythons[name].exists():
            sys.exit(
                f"{venv} is no virtual environment; make it with\n"
                f"  python -m venv {venv}\n"
                f"  {venv}/bin/pip install torch==2.13.0\n"
                f"  {venv}/bin/pip install -r benchmarks/requirements-peers-{name}.txt"
            )
    return pythons


def make_job(case: Case, given: argparse.Namespace, folder: Path, **more: Any) -> Job:
    """Write the training interactions of a case, and return its job."""
    events = training_events(case.table(), case.length)
    if users := getattr(given, "users", None):
        events = events[events["user_id"].isin(events["user_id"].unique()[:users])]
    events.to_csv(folder / "events.csv", index=False)
    options = {name: value for name, value in vars(given).items() if name in Job.__annotations__}
    return Job(
        events=str(folder / "events.csv"),
        length=case.length,
        targets=count_targets(events, case.length),
        **{**options, **more},
    )


def speeds(runs: Runs) -> list[float]:
    """Return the targets a second of every run."""
    return [run["targets_per_second"] for run in runs]


def show_speeds(runs: Runs) -> str:
    """Return the best run, which is the least disturbed, and the range of all."""
    values = speeds(runs)
    return f"{max(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def compute_ratio(ours: Runs, peers: Runs) -> float:
    """Return the speed of our best run over that of a peer's."""
    return max(speeds(ours)) / max(speeds(peers))


def compare(case: Case, side: Side, job: Job, ours: Runs, peers: Runs) -> list[str]:
    """Return the row of ours and a peer's; the ratio is of the best runs, and of each turn."""
    if ours[0]["items"] != peers[0]["items"]:
        sys.exit(f"{ours[0]['items']} items here, {peers[0]['items']} in {side.title}")
    ratio = compute_ratio(ours, peers)
    turns = [own / peer for own, peer in zip(speeds(ours), speeds(peers), strict=True)]
    return [
        *(case.title, f"{ours[0]['items']:,}", f"{job.targets:,}", side.title),
        *(show_speeds(ours), show_speeds(peers)),
        f"{ratio:.2f} ({min(turns):.2f} to {max(turns):.2f})",
        f"{case.goal:g}: {'met' if ratio >= case.goal else '**not met**'}",
    ]


def list_runs(case: Case, side: Side, runs: Runs) -> list[str]:
    """Return the row of every single run of a side, which shows their spread."""
    timed = ", ".join(f"{run['epochs']:.2f} epochs in {run['seconds']:.0f} s" for run in runs)
    figures = ", ".join(f"{speed:,.0f}" for speed in speeds(runs))
    return [case.title, side.title, f"{runs[0]['parameters']:,}", figures, timed]


def conditions(job: Job, load: float, sides: Mapping[Side, dict[str, Any]], activation: str) -> str:
    """Return the command, the settings of all sides, the machine and the versions."""
    titles: dict[str, dict[str, None]] = {}  # without settings, each once
    for side, run in sides.items():
        numbers = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
        line = f"python {run['python']}, {numbers}"
        titles.setdefault(line, {})[side.title.partition(",")[0]] = None
    versions = [f"- {'; '.join(names)}: {numbers}" for numbers, names in titles.items()]
    settings = (
        f"Settings: d = {job.hidden_size}, {job.n_layers} layers, {job.n_heads} heads, "
        f"feed-forward {job.inner_size} (against torch-rechub: d on both sides), "
        f"dropout {job.dropout:g}, on attention weights {job.attention_dropout:g}, "
        f"cross-entropy over all items where no negatives are named, {activation}, "
        f"{job.batch_size} sequences a batch, Adam with learning rate "
        f"{job.learning_rate:g}, float32, {job.threads} thread(s), cpu."
    )
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    machine = f"Machine: {cpu_name()}, {os.cpu_count()} cores; load {load:.2f} at first."
    return "\n\n".join((f"Command: `{command}`", settings, machine, "\n".join(versions)))


def cpu_name() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def make_parser(text: str | None, cases: list[str], peers: list[str]) -> argparse.ArgumentParser:
    """Return the parser of a benchmark against peers."""
    parser = argparse.ArgumentParser(description=(text or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=cases)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=peers)
    for name in ("rectools", "replay", "rechub"):
        parser.add_argument(f"--venv-{name}", type=Path, default=Path(f".venv-{name}"))
    parser.add_argument("--threads", type=int, default=1)
    return parser


def main() -> None:
    """Measure every case with every peer, and write the page."""
    parser = make_parser(__doc__, list(CASES), list(PEERS))
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side, 1 at least")
    for name in ("dropout", "attention_dropout", "warmup_seconds", "min_seconds", "max_seconds"):
        default = getattr(Job, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=default)
    parser.add_argument("--inner-size", type=int, default=Job.inner_size)
    parser.add_argument("--users", type=int, help="only the first so many users, to try it out")
    given = parser.parse_args()
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"busy machine (load {load:.2f}): expect lower and noisier numbers", flush=True)
    pythons, rows, single, first_runs = find_pythons(given), [], [], {}
    fastest: dict[tuple[str, str], tuple[float, list[str]]] = {}  # by dataset and loss: ratio, row
    peers = [PEERS[name] for name in given.peers]
    for case in (CASES[name] for name in given.cases):
        with tempfile.TemporaryDirectory() as folder:
            job = make_job(case, given, Path(folder))
            for settings in dict.fromkeys(peer.settings for peer in peers):
                alike = [peer for peer in peers if peer.settings == settings]
                own_job = replace(job, **dict(settings))
                measure = partial(run_worker, job=own_job, folder=Path(folder), pythons=pythons)
                runs = in_turns((OURS, *alike), given.repeats, measure)
                for peer in alike:
                    rows.append(compare(case, peer, job, runs[OURS], runs[peer]))
                    print(rows[-1], flush=True)
                    found = compute_ratio(runs[OURS], runs[peer]), rows[-1]
                    key = case.title, own_job.loss
                    fastest[key] = min(fastest.get(key, found), found)
                single += [list_runs(case, side, of_side) for side, of_side in runs.items()]
                first_runs |= {side: of_side[0] for side, of_side in runs.items()}
    heads = ("data", "items", "targets an epoch", "peer", "ours, targets/s: best (least to most)")
    heads = (*heads, "theirs", "ratio: of the best (of single turns)", "goal")
    timed = (
        f"Not timed: the first epoch or its first {job.warmup_seconds:g} s. Timed: at least "
        f"{job.min_seconds:g} s, at most {job.max_seconds:g} s."
    )
    if given.users:
        timed = f"**Only the first {given.users} users: not a result.** {timed}"
    activation = "the peer's activation (GELU in FlatSASRecNet, else ReLU)"
    settings = conditions(job, load, first_runs, activation)
    text = f"{table(heads, [row for _, row in fastest.values()])}\n\n{settings}\n\n{timed}"
    replace_section(RESULTS / "speed_peers.md", "speed", text)
    run_heads = ("data", "side", "parameters", "targets/s of each run", "timed")
    tables = f"{table(heads, rows)}\n\n## All runs\n\n{table(run_heads, single)}\n"
    runs = f"# Training speed against other libraries: all peers\n\n{tables}"
    (RESULTS / "tables" / "speed_peers.md").write_text(runs, encoding="utf-8")


if __name__ == "__main__":
    main()
