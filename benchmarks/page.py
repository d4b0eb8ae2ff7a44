"""What benchmarks share: processes of their own, sides in turns, tables, parts of a page."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
Side, Run = TypeVar("Side"), TypeVar("Run")


def in_a_process(script: str, *arguments: object, **environment: str) -> Any:
    """What a script prints last, as json: its memory and its allocator are its own."""
    words = [str(one) for one in arguments]
    command = [sys.executable, str(HERE / script), *words]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    print(" ".join(words), done.stdout.splitlines()[-1], flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def in_turns(
    sides: Iterable[Side], rounds: int, measure: Callable[[Side], Run]
) -> dict[Side, list[Run]]:
    """All runs of each side; they alternate, so that a slow spell of the machine meets them all."""
    runs: dict[Side, list[Run]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, found in runs.items():
            found.append(measure(side))
    return runs


def least(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The smallest value of each figure: what disturbs a run only makes it slower."""
    return {name: min(run[name] for run in runs) for name in runs[0]}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """In markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def mark(met: bool) -> str:
    """Of a goal."""
    return "yes" if met else "**no**"


class Report:
    """Lines of ours and a peer's, with the goal of each and whether it was met."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []

    def add(
        self,
        what: str,
        ours: float,
        peer: float,
        form: str = "{:.2f} s",
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> None:
        """One comparison; a goal is one of the ratio."""
        ratio, goal, met = ours / peer, "none", True
        if at_least is not None:
            goal, met = f">= {at_least:g}", ratio >= at_least
        if at_most is not None:
            goal, met = f"<= {at_most:g}", ratio <= at_most
        sides = form.format(ours), form.format(peer)
        self.rows.append([what, *sides, f"{ratio:.3g}", goal, mark(met)])

    def __str__(self) -> str:
        return table(("what", "ours", "peer", "ratio", "goal", "met"), self.rows)


def machine(threads: int | None = None) -> str:
    """Processor, threads and versions, which every page names."""
    import torch

    threads = threads or torch.get_num_threads()
    several = "s" * (threads > 1)
    return (
        f"{platform.processor() or platform.machine()}, {threads} thread{several}, torch "
        f"{torch.__version__}, Python {platform.python_version()}"
    )


def replace_section(page: Path, name: str, text: str) -> None:
    """Put text between the begin and end marks of a page."""
    begin, end = (f"<!-- {side} {name} -->" for side in ("begin", "end"))
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
    print(text)
