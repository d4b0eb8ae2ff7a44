"""``make bench-convert``: seconds of `recbole-pos convert` against reading the csv and one sort.

What no one can do without is ``pandas.read_csv(engine="pyarrow")`` and a sort by time. Sides take
turns, every turn in a process of its own; each figure is the best of its side.
ARGS="--events 20000000".
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from page import in_turns, least, run_alone
from pyarrow import csv

from recbole_pos.experiment.folder import peak_rss_mb

SIDES = ("pandas", "convert")
GOAL = 3.0


def write_orders(path: Path, events: int) -> None:
    """Write interactions by time: ids, ISO dates, stars with holes, brand and price of products."""
    rng = np.random.default_rng(0)
    users, items = max(events // 20, 1), max(events // 100, 1)
    brands, prices = rng.integers(0, 500, items), rng.integers(99, 9999, items) / 100
    now, batch = 1_577_836_800, 1_000_000
    with path.open("wb") as file:
        for start in range(0, events, batch):
            n = min(batch, events - start)
            item = (items * rng.random(n) ** 2).astype(np.int64)
            times = now + np.cumsum(rng.integers(0, 30, n))
            now = times[-1]
            stars = pa.array(rng.integers(1, 6, n), mask=rng.random(n) < 0.3)
            table = {
                "customer": pa.array(np.char.add("c", rng.integers(0, users, n).astype(str))),
                "product": pa.array(np.char.add("p", item.astype(str))),
                "bought_at": pa.array(times.astype("datetime64[s]")).cast(pa.string()),
                "stars": stars,
                "brand": pa.array(np.char.add("Brand ", brands[item].astype(str))),
                "price": prices[item],
            }
            header = csv.WriteOptions(include_header=not start, quoting_style="none")
            csv.write_csv(pa.table(table), file, header)


def measure(side: str, path: Path, threads: int) -> dict[str, float]:
    """Return seconds and memory of one side in this process."""
    pa.set_cpu_count(threads)
    if side == "pandas":
        import pandas as pd

        started = time.perf_counter()
        table = pd.read_csv(path, engine="pyarrow")
        read = time.perf_counter() - started
        table.sort_values("bought_at")
        return {"seconds": time.perf_counter() - started, "read": read, "mb": peak_rss_mb()}
    import recbole_pos

    started = time.perf_counter()
    recbole_pos.convert(path, name="shop", data_path=path.parent, overwrite=True, verbose=False)
    return {"seconds": time.perf_counter() - started, "mb": peak_rss_mb()}


def main() -> None:
    """Measure every side in turn, and print the ratio."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of Arrow, on both sides")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "orders.csv"
        write_orders(path, given.events)
        print(f"{given.events:,} interactions, {path.stat().st_size / 1e6:,.0f} MB of csv")
        runs = in_turns(
            SIDES, given.rounds, lambda side: run_alone(measure, side, path, given.threads)
        )
    best = {side: least(of_side) for side, of_side in runs.items()}
    ratio = best["convert"]["seconds"] / best["pandas"]["seconds"]
    print(f"convert / (read_csv and sort): {ratio:.2f} (goal: at most {GOAL:g})")


if __name__ == "__main__":
    main()
