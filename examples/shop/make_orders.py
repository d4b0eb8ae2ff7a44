"""A generated shop: orders.csv, later.csv (orders and a week more), in_stock.txt, baskets.jsonl.

Customers come back to a few tastes, and buy refills some weeks after the thing itself, so that
order and time tell something. The files are as shops have them: spaces, unicode, missing cells, the
same product once with and once without its category, a line without its date.

    python make_orders.py FOLDER [CUSTOMERS]
"""

from __future__ import annotations

import csv
import json
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np

TASTES = ["kites", "Küche", "books, used", "garden", "café ☕", "bicycles"]
COLOURS = ["red", "blue", "green", "grün-weiß", "black", "white"]
THINGS = ["starter set", "refill", "bag", "deluxe"]
FIRST = datetime(2025, 1, 6, 9, tzinfo=timezone.utc)
HEADER = ["order no", "customer", "product", "bought at", "category", "price"]


def products() -> list[dict[str, str]]:
    """The catalogue: of each taste four things in six colours."""
    rng = np.random.default_rng(0)
    return [
        {"product": f"{colour} {taste} {thing}", "category": taste, "price": f"{price:.2f}"}
        for taste in TASTES
        for colour in COLOURS
        for thing, price in zip(THINGS, rng.uniform(3, 90, len(THINGS)), strict=True)
    ]


def orders(customers: int, seed: int = 1) -> list[list[str]]:
    """One line an order, by time."""
    rng, catalogue = np.random.default_rng(seed), products()
    per_taste = len(COLOURS) * len(THINGS)
    lines: list[tuple[datetime, list[str]]] = []
    for customer in range(customers):
        taste, when = (
            int(rng.integers(len(TASTES))),
            FIRST + timedelta(days=float(rng.uniform(0, 90))),
        )
        colour = int(rng.integers(len(COLOURS)))
        for thing in range(int(rng.integers(3, 15))):
            if rng.random() < 0.2:
                taste = int(rng.integers(len(TASTES)))
            number = taste * per_taste + colour * len(THINGS) + thing % len(THINGS)
            product = catalogue[number]
            line = ["", f"Customer {customer}", product["product"], f"{when:%Y-%m-%d %H:%M:%S}"]
            known = rng.random() < 0.9  # a cell is missing now and then
            lines.append((when, [*line, product["category"] if known else "", product["price"]]))
            when += timedelta(days=float(rng.gamma(2, 9)))
    lines.sort(key=lambda line: line[0])
    return [[str(number), *line[1:]] for number, (_, line) in enumerate(lines, start=1)]


def write(file: Path, lines: list[list[str]]) -> None:
    """A csv file."""
    with open(file, "w", newline="", encoding="utf-8") as text:
        csv.writer(text).writerows([HEADER, *lines])


def main(folder: Path, customers: int = 1500) -> None:
    """Write the files."""
    folder.mkdir(parents=True, exist_ok=True)
    every = orders(customers)
    first = every[: len(every) * 97 // 100]
    first[10] = [*first[10][:4], "garden sale", first[10][5]]  # contradicts all other lines
    first[20] = [*first[20][:3], "", *first[20][4:]]  # no one knows when
    later = [*first, *every[len(first) :]]
    newest = later[-1]
    later += [
        [str(len(later) + n), f"Customer {n}", "silver kites kite", *newest[3:]] for n in range(9)
    ]
    write(folder / "orders.csv", first)
    write(folder / "later.csv", later)
    stock = [product["product"] for product in products()][::2]
    (folder / "in_stock.txt").write_text("\n".join(stock) + "\n", encoding="utf-8")
    baskets = [
        {"id": "basket 1", "items": [stock[0], stock[1]], "times": [1767000000, 1767003600]},
        {"id": "basket 2", "items": ["never heard of"], "times": [1767000000]},
    ]
    text = "".join(json.dumps(basket, ensure_ascii=False) + "\n" for basket in baskets)
    (folder / "baskets.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
