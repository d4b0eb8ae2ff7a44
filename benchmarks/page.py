"""What all benchmarks share: options, separate processes, sides in turn, times, tables, pages.

A benchmark compares sides (models, libraries) that are measured in alternation, each in a process
of its own, and writes a table between two marks of a page (``<!-- begin NAME -->``).
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch

HERE = Path(__file__).parent
DOCS, RESULTS = HERE.parent / "docs", HERE.parent / "results"
THREADS = int(os.environ.get("BENCH_THREADS", "2"))  # of each process that is measured
Side, Run = TypeVar("Side"), TypeVar("Run")


def parse_options(text: str | None, **defaults: Any) -> argparse.Namespace:
    """Return the options of the command line, each of the type of its default.

    A default of False makes a switch, and a list of names an option that takes some of the names.

    Args:
        text: docstring of the benchmark, whose first line ``--help`` shows.
        defaults: name -> default of each option.
    """
    parser = argparse.ArgumentParser(description=(text or "").partition("\n")[0])
    for name, default in defaults.items():
        if default is False:
            parser.add_argument(f"--{name}", action="store_true")
        elif isinstance(default, list):
            parser.add_argument(f"--{name}", nargs="+", default=default)
        else:
            parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()


def run_alone(function: Callable[..., Run], *args: Any) -> Run:
    """Return what a function returns in a new process, so that memory and allocator are its own.

    The process computes with ``THREADS`` threads. Arguments and result are printed.

    Args:
        function: a function of a module, with a result that json can hold.
        args: its arguments.
    """
    with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (THREADS,)) as pool:
        result = pool.submit(function, *args).result()
    print(*args, json.dumps(result), flush=True)
    return result


def run_worker(venv: str, module: str, task: Any) -> str:
    """Run a worker in the virtual environment of a library, and return what it prints.

    If it fails, its error is shown, and the benchmark ends with a ``CalledProcessError``.

    Args:
        venv: name of the environment, which the Makefile makes; empty for that of this process.
        module: module in ``peer_workers``.
        task: what it has to do, an object of a dataclass.
    """
    python = HERE.parent / f".venv-{venv}" / "bin" / "python" if venv else sys.executable
    command = [python, "-m", f"peer_workers.{module}", json.dumps(asdict(task))]
    environment = os.environ | {"PYTHONPATH": str(HERE.parent), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=HERE, env=environment, stdout=subprocess.PIPE, check=True, text=True
    )
    print(done.stdout, flush=True)
    return done.stdout


def in_turns(
    sides: Iterable[Side], rounds: int, measure: Callable[[Side], Run]
) -> dict[Side, list[Run]]:
    """Return the results of measuring each side several times.

    Sides alternate, so that a slow spell of the machine meets all of them.

    Args:
        sides: what is compared.
        rounds: how many times each side is measured.
        measure: measures one side, and returns its result.

    Returns:
        side -> its results, in the order of rounds.
    """
    runs: dict[Side, list[Run]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side in runs:
            runs[side].append(measure(side))
    return runs


def time_call(call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds that a call takes, by a clock such as ``time.perf_counter``."""
    began = clock()
    call()
    return clock() - began


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in markdown, from the texts of its header and of the cells in each row."""
    head = list(head)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def mark(is_met: bool) -> str:
    """Return how a table shows whether a goal is met."""
    return "yes" if is_met else "**no**"


def machine(threads: int = THREADS) -> str:
    """Return processor, threads, versions and load as text, which every page has."""
    return (
        f"{platform.processor() or platform.machine()}, {threads} thread{'s' * (threads > 1)}, "
        f"torch {torch.__version__}, Python {platform.python_version()}, load of the machine "
        f"{os.getloadavg()[0]:.1f} of {os.cpu_count()} cores"
    )


def replace_section(page: Path, name: str, text: str) -> None:
    """Put text between the marks ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` of a page.

    The text is printed, too.

    Args:
        page: the file, in markdown.
        name: name of the section.
        text: its new text.
    """
    begin, end = (f"<!-- {side} {name} -->" for side in ("begin", "end"))
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
    print(text)
