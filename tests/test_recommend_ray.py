"""Recommendations by a cluster are those of one process, whatever it loses. Real raylets."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from conftest import wait
from ray.cluster_utils import Cluster
from test_recommend import trained
from test_recommend_parquet import drawn

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config.plugins import pack
from recbole_pos.errors import StorageError, UsageError
from recbole_pos.screen import Screen
from recbole_pos.serve.on_ray import _collect, _Part, recommend_on_ray
from recbole_pos.serve.recommend import write_recommendations


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Two raylets on loopback, one CPU each."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    yield made
    ray.shutdown()
    made.shutdown()


def rows_of(folder: Path) -> pd.DataFrame:
    table = pd.read_parquet(folder)
    who = table.columns[0]
    return table.sort_values([who, "rank"], ignore_index=True)


def same(found: pd.DataFrame, want: pd.DataFrame) -> None:
    want = want.sort_values([want.columns[0], "rank"], ignore_index=True)
    pd.testing.assert_frame_equal(found, want, check_dtype=False, rtol=1e-4)


def slow(log: Path) -> Callable[[], None]:
    """A function that makes a worker take its time for a part, and note where it is done."""
    file = str(log)

    def hook() -> None:
        import os
        import time

        import ray

        from recbole_pos.serve.on_ray import _Part

        write = _Part._write

        def _write(self, unit, path):
            found = write(self, unit, path)
            with open(file, "a") as stream:
                stream.write(f"{ray.get_runtime_context().get_node_id()} {os.getpid()}\n")
            time.sleep(0.4)
            return found

        _Part._write = _write

    return hook


@pytest.mark.slow
def test_users_and_histories(tiny: Path, tmp_path: Path, capfd) -> None:
    run_dir = trained("PosSASRec", tiny, tmp_path / "run")
    capfd.readouterr()
    command = ["recommend", str(run_dir), "--address", "local", "--processes", "1", "-k", "3"]
    assert main([*command, "--exclude_seen", "--out", str(tmp_path / "users")]) == 0
    out, noise = capfd.readouterr()
    assert not ray.is_initialized()
    want = recbole_pos.recommend(run_dir, k=3, mask_history=True)
    same(rows_of(tmp_path / "users"), want)
    assert f"{len(want)} recommendations of PosSASRec" in out
    assert not any(word in noise for word in ("ray.data", "Deprecat", "Traceback")), noise
    (tmp_path / "given").mkdir()
    given = [drawn(seed, 400) for seed in range(2)]
    for number, part in enumerate(given):
        for row in part:
            row["id"] += f" of {number}"
        pq.write_table(pa.Table.from_pylist(part), tmp_path / "given" / f"{number}.parquet")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        recommend_on_ray(run_dir, tmp_path / "people", histories=tmp_path / "given", k=4)
        one = tmp_path / "people.parquet"
        write_recommendations(run_dir, histories=tmp_path / "given", k=4, out=one)
        same(rows_of(tmp_path / "people"), pd.read_parquet(one))
        assert len(list((tmp_path / "people").iterdir())) > 1
        given[1][300]["items"] = [None]
        pq.write_table(pa.Table.from_pylist(given[1]), tmp_path / "given" / "1.parquet")
        with pytest.raises(UsageError, match="items of 'p300 of 1': a value is"):
            recommend_on_ray(run_dir, tmp_path / "no", histories=tmp_path / "given", k=4)
    finally:
        ray.shutdown()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"run", "users", "given", "people", "people.parquet"}


@pytest.mark.long
def test_a_node_is_killed_in_the_middle(cluster: Cluster, tiny: Path, tmp_path: Path) -> None:
    run_dir, log = trained("PosSASRec", tiny, tmp_path / "run"), tmp_path / "log"
    pq.write_table(pa.Table.from_pylist(drawn(0, 8000)), tmp_path / "h.parquet", row_group_size=200)
    hook = {"worker_process_setup_hook": slow(log)}
    ray.init(cluster.address, runtime_env=hook, log_to_driver=False)
    other = next(iter(cluster.worker_nodes))
    killed: list[str] = []

    def there() -> list[str]:
        lines = log.read_text().splitlines() if log.exists() else []
        return [line.split()[1] for line in lines if line.split()[0] == other.node_id]

    def kill() -> None:
        """When two parts were made on the other machine."""
        wait(lambda: len(there()) >= 2)
        killed.append(other.node_id)
        os.kill(other.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        for pid in set(there()):
            os.kill(int(pid), signal.SIGKILL)  # a machine takes its processes along

    killer = threading.Thread(target=kill)
    killer.start()
    recommend_on_ray(run_dir, tmp_path / "out", histories=tmp_path / "h.parquet", k=4)
    killer.join()
    made = log.read_text().splitlines()
    assert killed and made[-1].split()[0] != other.node_id
    write_recommendations(run_dir, histories=tmp_path / "h.parquet", k=4, out=tmp_path / "one.csv")
    same(rows_of(tmp_path / "out"), pd.read_csv(tmp_path / "one.csv"))
    assert not list(tmp_path.glob(".*"))


def test_a_machine_does_not_find_the_run(tiny: Path, tmp_path: Path) -> None:
    run_dir = trained("PosSASRec", tiny, tmp_path / "run")
    asked = {"packed": pack("PosSASRec"), "k": 3, "exclude_seen": None}
    asked |= {"allowed": None, "excluded": None}
    batch = pa.table({"users": [["u1"]]})
    for run, place, told in (
        (tmp_path / "elsewhere", tmp_path, "elsewhere is not a run folder"),
        (run_dir, tmp_path / "no" / "out", f"does not find the folder of --out, {tmp_path}/no"),
    ):
        (row,) = _Part(run_dir=str(run), place=str(place), **asked)(batch).to_pylist()
        assert told in row["error"] and "all machines must reach run, data" in row["error"]
    (row,) = _Part(run_dir=str(run_dir), place=str(tmp_path), **asked)(batch).to_pylist()
    assert (row["error"], row["rows"]) == ("", 3)


def test_what_a_lost_process_has_written_is_left_out(tmp_path: Path) -> None:
    """Each part that was delivered is there once; one that is not seen here is an error."""
    rows = [{"file": f"{n}.tmp", "error": "", "rows": n, "people": n} for n in range(3)]
    rows = [{**row, "popular": 0, "seen": 0, "unknown": 1} for row in rows]
    for n in (1, 2, 7):  # 0 has no rows, and no file; 7 was not delivered
        pq.write_table(pa.table({"id": [str(n)] * n}), tmp_path / f"{n}.tmp")
    found = SimpleNamespace(iter_rows=lambda: iter(rows))
    counts = _collect(found, tmp_path, 3, Screen(False))
    assert (counts.rows, counts.people, counts.unknown) == (3, 3, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"part-0000{n}.parquet" for n in "01"
    ]
    assert sorted(pd.read_parquet(tmp_path)["id"]) == ["1", "2", "2"]
    with pytest.raises(StorageError, match="cannot read what a machine wrote"):
        _collect(found, tmp_path, 3, Screen(False))


def test_options_that_do_not_fit(tiny: Path, tmp_path: Path, capsys) -> None:
    run_dir = trained("PosSASRec", tiny, tmp_path / "run")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    (tmp_path / "h.jsonl").touch()
    out = ["--out", str(tmp_path / "out")]
    for options, told in (
        (["--address", "local"], "give --out, a folder"),
        (["--address", "local", "--out", str(tmp_path / "there")], "is there already"),
        (["--processes", "2"], "--processes: goes with --address"),
        (["--address", "local", "--processes", "0", *out], "expected 1 or more, found 0"),
        (["--address", "local", "-k", "0", *out], "k: expected 1 to"),
        (["--address", "local", "--histories", str(tmp_path / "h.jsonl"), *out], "parquet is read"),
        (["--address", "localhost:1", *out], "no Ray cluster answers at 'localhost:1'"),
    ):
        assert main(["recommend", str(run_dir), *options]) == 2
        assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not ray.is_initialized()
