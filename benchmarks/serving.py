"""How fast trained models answer: ``make bench-serve``, ``make bench-recommend``.

    python benchmarks/serving.py serve|recommend|index

``serve`` asks `recbole-pos serve` and the library one request at a time, on one core: FPARec of the
default size with random weights; it writes the table of docs/serving.md. ``recommend`` asks for
many histories at once, `Recommender` against RecBole's `full_sort_topk`, and for a million items;
``index`` measures the approximate index of a million items, on trained vectors. Both write
results/recommend.md.
"""

import http.client
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from data import make_log, write_atomic
from page import DOCS, RESULTS, in_turns, machine, replace_section, run_alone, table, time_call
from recbole.utils.case_study import full_sort_topk

import recbole_pos
from recbole_pos.config.arguments import IndexArguments
from recbole_pos.experiment.folder import peak_rss_mb
from recbole_pos.serve.item_index import FILE as INDEX_FILE
from recbole_pos.serve.item_index import use_index

LENGTH = 50  # interactions of a history
WARM = 20  # requests before those that are timed
Request = Callable[[list[str]], Any]


def make_run(folder: Path, items: np.ndarray, catalogue: pd.DataFrame, **options: Any) -> Path:
    """Train FPARec on users with histories of one length, and return the folder of its run.

    All items are in a file of their own, so that few interactions make a model of any size.

    Args:
        folder: folder for the data and the run.
        items: [users, length] items of the interactions of each user.
        catalogue: a row for each item, with columns named as in an atomic file.
        options: further options of the run.
    """
    lengths = np.full(len(items), items.shape[1])
    file = write_atomic(make_log(lengths, items.ravel()), folder, "generated")
    catalogue.to_csv(file.with_suffix(".item"), sep="\t", index=False)
    options = {"data_path": str(folder), "epochs": 1, "load_col": None, **options}
    run_dir = folder / "run"
    recbole_pos.run("FPARec", "generated", None, options, run_dir=run_dir, verbose=False)
    return run_dir


def make_small_run(folder: Path, items: int, users: int = 40, **options: Any) -> Path:
    """Train for one epoch on 60 random interactions of each user, as :func:`make_run` does."""
    chosen = np.random.default_rng(0).integers(0, items, (users, 60))
    return make_run(folder, chosen, pd.DataFrame({"item_id:token": np.arange(items)}), **options)


def sample_histories(names: np.ndarray, count: int) -> list[list[str]]:
    """Return ``count`` random histories of LENGTH items each, which are lists of names."""
    return np.random.default_rng(1).choice(names, (count, LENGTH)).tolist()


# --- serve: one request at a time ---

SERVE_ITEMS, REQUESTS = (10_000, 100_000), 1_500
SERVE_HEADS = ("items", "`recommend`, ms", "its CPU time, ms", "one client, ms")


def time_requests(
    request: Request, histories: list[list[str]], clock: Callable[[], float] = time.perf_counter
) -> str:
    """Return median and 99th percentile of the times of requests in ms, such as ``1.2 / 3.4``.

    Args:
        request: answers one history.
        histories: a request for each; the first ones are also sent before, to warm up.
        clock: returns the present time in seconds.
    """
    for history in histories[:WARM]:
        request(history)
    seconds = [time_call(partial(request, history), clock) for history in histories]
    return " / ".join(f"{1000 * x:.1f}" for x in np.percentile(seconds, (50, 99)))


def make_client(port: int) -> Request:
    """Return a function that asks a server for recommendations, over one open connection.

    Args:
        port: port of the server on this machine.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port)

    def request(history: list[str]) -> None:
        body = json.dumps({"histories": [history], "k": 10})
        connection.request("POST", "/recommend", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status == 200, text

    return request


@contextmanager
def start_server(run_dir: Path) -> Iterator[int]:
    """Run `recbole-pos serve` during a ``with`` block, and yield its port once it listens.

    Args:
        run_dir: folder of the run to serve.
    """
    command = [sys.executable, "-m", "recbole_pos", "serve", str(run_dir), "--port=0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        lines = (re.search(r"running on http://127.0.0.1:(\d+)", line) for line in server.stderr)
        yield int(next(match[1] for match in lines if match))
    finally:
        server.terminate()
        server.wait()


def measure_requests(items: int, requests: int) -> list[str]:
    """Return a row of the table: times of single requests to the library and to the server.

    Args:
        items: number of items of the model.
        requests: number of requests.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = make_small_run(Path(folder), items)
        recommender = recbole_pos.Recommender.load(run_dir)
        histories = sample_histories(recommender.items, requests)

        def call(history: list[str]) -> None:
            recommender.recommend(histories=[history], k=10)

        library = time_requests(call, histories), time_requests(call, histories, time.thread_time)
        with start_server(run_dir) as port:
            return [f"{items:,}", *library, time_requests(make_client(port), histories)]


def write_serve() -> None:
    """Measure single requests, and write the table."""
    rows = [measure_requests(items, REQUESTS) for items in SERVE_ITEMS]
    note = f"{REQUESTS:,} requests, {machine(1)}."
    replace_section(DOCS / "serving.md", "speed", f"{table(SERVE_HEADS, rows)}\n\n{note}")


# --- recommend: many histories at once ---

USERS, ITEMS, K = 5_000, 10_000, 20
HISTORIES, ROUNDS = 20_000, 3
MILLION, SOME = 1_000_000, 4_096
ONE_BY_ONE = 200  # users of a turn of RecBole's


def compare_with_recbole() -> str:
    """Return a table of users a second of RecBole's function and of ours, in several forms."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"MAX_ITEM_LIST_LENGTH": LENGTH, "train_windows": "last"}
        run_dir = make_small_run(Path(folder), ITEMS, USERS, **options)
        recommender = recbole_pos.Recommender.load(run_dir)
        experiment = recbole_pos.load(run_dir)

    # The same histories as lists, as columns of pyarrow, and users of the data for RecBole.
    histories = sample_histories(recommender.items, HISTORIES)
    columns = pa.table({"id": np.arange(HISTORIES).astype(str), "items": histories})
    test, model = experiment.loaders["test"], experiment.model.eval()

    def one_by_one() -> None:
        for user in range(1, 1 + ONE_BY_ONE):
            full_sort_topk(np.array([user]), model, test, K)

    recommend = partial(recommender.recommend, k=K, exclude_seen=True)
    # Name of a side -> number of users that a call answers, and the call.
    sides: dict[str, tuple[int, Callable[[], Any]]] = {
        "`full_sort_topk`, user by user": (ONE_BY_ONE, one_by_one),
        "`recommend(histories=)`, columns": (HISTORIES, partial(recommend, histories=columns)),
        "`recommend(histories=)`, lists": (HISTORIES, partial(recommend, histories=histories)),
        "`recommend()`, all users of the data": (USERS, recommend),
    }
    runs = in_turns(sides, ROUNDS + 1, lambda name: sides[name][0] / time_call(sides[name][1]))
    rates = {name: of_side[1:] for name, of_side in runs.items()}  # the first warms up

    baseline = np.median(next(iter(rates.values())))
    lines = []
    for name, of_side in rates.items():
        figures = (f"{summary(of_side):,.0f}" for summary in (np.median, min, max))
        lines.append([name, *figures, f"{np.median(of_side) / baseline:.1f}"])
    heads = ("side", "users a second: median", "least", "most", "times `full_sort_topk`")
    return table(heads, lines)


def measure_million() -> tuple[float, float, float]:
    """Return speed and memory of recommending from a million items, in this process.

    Returns:
        Users a second; MB of the process before; MB at its peak.
    """
    with tempfile.TemporaryDirectory() as folder:
        recommender = recbole_pos.Recommender.load(make_small_run(Path(folder), MILLION))
        histories = sample_histories(recommender.items, SOME)
        recommender.recommend(histories=histories[:8], k=K)
        Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
        before = peak_rss_mb()
        recommend = partial(recommender.recommend, histories=histories, k=K, exclude_seen=True)
        return SOME / time_call(recommend), before, peak_rss_mb()


# --- recommend --index: an approximate index of a million items ---

GROUPS, INTERESTS = 5_000, 3  # groups of items that are bought together, and those of a user
SHOPPERS, SHOPPING_EPOCHS = 20_000, 2
RECALLS = (0.9, 0.95, 0.99)


def sample_shoppers(users: int, seed: int) -> np.ndarray:
    """Return the histories of users who have a few interests, as item numbers [users, LENGTH].

    The items are divided into groups of 200. A user has three interests, which are groups, and
    each interaction is with a random item of one of them.
    """
    rng = np.random.default_rng(seed)
    interests = rng.integers(0, GROUPS, (users, INTERESTS))
    group = np.take_along_axis(interests, rng.integers(0, INTERESTS, (users, LENGTH)), 1)
    return group + GROUPS * rng.integers(0, MILLION // GROUPS, (users, LENGTH))


def train_million(folder: Path) -> Path:
    """Train a model on few interactions of each item, and return the folder of its run.

    An item has its group as a feature, as goods have a category, so that its vector is learned from
    the interactions with the whole group, beside its own.
    """
    ids = np.arange(MILLION)
    catalogue = pd.DataFrame({"item_id:token": ids, "group:token": ids % GROUPS})
    options: dict[str, Any] = {"item_features": ["group"], "valid_users": 100}
    options |= {"MAX_ITEM_LIST_LENGTH": LENGTH, "loss_type": "sampled_softmax"}
    options |= {"learning_rate": 0.01, "epochs": SHOPPING_EPOCHS, "eval_step": 0}
    options["eval_args"] = {"split": {"LS": "valid_only"}}  # nothing is tested
    return make_run(folder, sample_shoppers(SHOPPERS, seed=0), catalogue, **options)


def measure_index() -> tuple[list[list[str]], str]:
    """Return a row for the exact search and for each recall of the index, and a note."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = train_million(Path(folder))
        recommender = recbole_pos.Recommender.load(run_dir)
        names = sample_shoppers(SOME, seed=1).astype(str).tolist()  # other users than those trained

        def time_users() -> tuple[float, set[tuple[Any, str]]]:
            """Return users a CPU-second, and the pairs of user and item that are recommended."""
            began = time.process_time()
            lists = recommender.recommend(histories=names, k=K, exclude_seen=True)
            seconds = time.process_time() - began
            return SOME / seconds, set(zip(lists["id"], lists["item"], strict=True))

        recommender.recommend(histories=names[:8], k=K)  # warms up
        exact_rate, exact = time_users()
        rows = [["all items", "", "", "1", f"{exact_rate:,.0f}", "1.0"]]
        make_index = partial(use_index, recommender, IndexArguments("faiss"))
        build = time_call(make_index, time.process_time)
        for recall in RECALLS:
            use_index(recommender, IndexArguments("faiss", recall))  # reads what was built
            index = recommender.scorer.index
            rate, found = time_users()
            probes = f"{index.num_probes:,} of {len(index.centroids):,}"
            measured = len(found & exact) / len(exact)
            row = [f"`--index_recall {recall}`", probes, f"{index.recall:.4f}", f"{measured:.4f}"]
            rows.append([*row, f"{rate:,.0f}", f"{rate / exact_rate:.1f}"])
        megabytes = (run_dir / INDEX_FILE).stat().st_size / 1e6
    return rows, f"built in {build:,.0f} CPU-seconds and kept in a file of {megabytes:,.1f} MB"


def write_index() -> None:
    """Measure the approximate index of a million items, and write its table."""
    rows, built = run_alone(measure_index)
    heads = ("scored", "lists read", "recall@100 when built", f"recall@{K} here")
    note = (
        f"{MILLION:,} items, d = 64, trained on {SHOPPERS * LENGTH:,} interactions of {SHOPPERS:,} "
        f"generated users with {INTERESTS} of {GROUPS:,} interests each; {SOME:,} histories of "
        f"{LENGTH} items of other such users, the {K} best of which the history has none. The "
        f"index was {built}; {machine()}."
    )
    text = table((*heads, "users a CPU-second", "times all items"), rows)
    replace_section(RESULTS / "recommend.md", "index", f"{text}\n\n{note}")


def write_recommend() -> None:
    """Measure many histories, and write the page."""
    rate, before, peak = run_alone(measure_million)
    parts = (
        compare_with_recbole(),
        f"{HISTORIES:,} histories of {LENGTH} items, {ITEMS:,} items, the {K} best of which "
        f"the history has none, names in and out; {ROUNDS} rounds, sides in turns; "
        f"{machine()}.",
        f"**A million items**, {SOME:,} histories: {rate:,.0f} users a second; the process has "
        f"{before:,.0f} MB before and {peak:,.0f} MB at its peak. Scores of all histories and "
        f"items would be {SOME * MILLION * 4 / 1e6:,.0f} MB.",
    )
    replace_section(RESULTS / "recommend.md", "speed", "\n\n".join(parts))


if __name__ == "__main__":
    {"serve": write_serve, "recommend": write_recommend, "index": write_index}[sys.argv[1]]()
