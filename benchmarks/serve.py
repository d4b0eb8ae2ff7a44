"""How fast `recbole-pos serve` answers: FPARec of the default size, random weights, one core.

Writes the table of docs/serving.md. The catalogue is in an item file, so that training for one
epoch, on 2,400 interactions, makes a model of any size.

    python benchmarks/serve.py [--requests 2000]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

ONE_CORE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
os.environ.update(ONE_CORE)

import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402
from data import make_log, write_atomic  # noqa: E402
from page import (  # noqa: E402
    DOCS,
    machine,
    replace_section,
    show_percentiles,
    table,
    time_call,
)

import recbole_pos  # noqa: E402

HISTORY, K = 50, 10
HEAD = (
    *("items", "`recommend`, ms", "its CPU time, ms", "one client, ms", "four clients, ms"),
    "requests/s",
)


def make_run(folder: Path, items: int) -> Path:
    """Train a model that knows so many items, and return its run."""
    name, chosen = f"items{items}", np.random.default_rng(0).integers(0, items, 2_400)
    file = write_atomic(make_log(np.full(40, 60), chosen), folder, name)
    catalogue = pd.DataFrame({"item_id:token": np.arange(items), "price:float": 1.0})
    catalogue.to_csv(file.with_suffix(".item"), sep="\t", index=False)
    columns = {"inter": ["user_id", "item_id", "timestamp"], "item": ["item_id", "price"]}
    options = {"data_path": str(folder), "epochs": 1, "load_col": columns}
    run_dir = folder / f"{name}-run"
    recbole_pos.run("FPARec", name, None, options, run_dir=run_dir, verbose=False)
    return run_dir


def time_requests(
    request: Callable[[list[str]], Any],
    histories: list[list[str]],
    clock: Callable[[], float] = time.perf_counter,
) -> str:
    """Return p50 / p99 in ms, after some requests that warm up."""
    for history in histories[:50]:
        request(history)
    return show_percentiles([time_call(partial(request, x), clock) for x in histories], 1)


class Client:
    """A client that keeps its connection."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port)

    def recommend(self, history: list[str]) -> None:
        """Request recommendations after a history, and read the answer."""
        body = json.dumps({"histories": [history], "k": K})
        self.connection.request("POST", "/recommend", body, {"Content-Type": "application/json"})
        answer = self.connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise RuntimeError(text.decode())


def load_server(port: int, histories: list[list[str]]) -> tuple[str, float]:
    """Return p50 / p99 in ms and requests a second of four clients, each with a quarter of them."""

    def work(number: int) -> list[float]:
        client = Client(port)
        return [time_call(partial(client.recommend, x)) for x in histories[number::4]]

    began = time.perf_counter()
    with ThreadPoolExecutor(4) as clients:
        seconds = [x for some in clients.map(work, range(4)) for x in some]
    rate = len(seconds) / (time.perf_counter() - began)
    return show_percentiles(seconds, 1), rate


def measure(run_dir: Path, items: int, requests: int) -> list[str]:
    """Return a row of the table."""
    rng = np.random.default_rng(1)
    histories = [rng.integers(0, items, HISTORY).astype(str).tolist() for _ in range(requests)]
    recommender = recbole_pos.Recommender.load(run_dir)

    def call(history: list[str]) -> None:
        recommender.recommend(histories=[history], k=K)

    library = time_requests(call, histories), time_requests(call, histories, time.thread_time)
    arguments = ["-m", "recbole_pos", "serve", str(run_dir), "--port=0"]
    server = subprocess.Popen([sys.executable, *arguments], stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        lines = (re.search(r"running on http://127.0.0.1:(\d+)", line) for line in server.stderr)
        port = int(next(match[1] for match in lines if match))
        one = time_requests(Client(port).recommend, histories)
        four, rate = load_server(port, histories)
    finally:
        server.terminate()
        server.wait()
    return [f"{items:,}", *library, one, four, f"{rate:,.0f}"]


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            measure(make_run(Path(folder), items), items, given.requests)
            for items in (10_000, 100_000)
        ]
    note = f"{given.requests:,} requests, {os.cpu_count()} cores, {machine(1)}, "
    load = f"load of the machine {os.getloadavg()[0]:.1f}"
    page = DOCS / "serving.md"
    replace_section(page, "speed", f"{table(HEAD, rows)}\n\n{note}{load}.")


if __name__ == "__main__":
    main()
