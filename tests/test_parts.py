"""Recommendations in parts: the same from any processes, after any kill, and never mixed."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pyarrow.parquet as pq
import pytest
from conftest import fork, wait
from killed_tasks import die, square_but_die_once

from recbole_pos.cli.main import main
from recbole_pos.errors import PosError
from recbole_pos.serve.part_workers import run_workers
from recbole_pos.serve.recommender import Recommender

USERS = 60


@pytest.fixture(scope="module")
def run(trained: Callable[..., Path]) -> Path:
    return trained("PosSASRec")


def command(run: Path, out: Path, *more: Any) -> list[str]:
    words = ["recommend", run, "--users", "all", "--out", f"{out}/", "--part_rows", 7, "-k", 5]
    return list(map(str, (*words, *more)))


def contents(out: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(out.glob("part-*"))}


@pytest.fixture(scope="module")
def whole(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Name -> bytes of the parts that one process writes."""
    out = tmp_path_factory.mktemp("whole")
    assert main(command(run, out)) == 0
    return contents(out)


def start(run: Path, out: Path, *more: Any) -> subprocess.Popen:
    words = [sys.executable, "-m", "recbole_pos", *command(run, out, *more)]
    return subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def test_parts_are_the_table_of_recommend(run: Path, whole: dict[str, bytes], tmp_path) -> None:
    """And pandas reads the folder as one table."""
    assert len(whole) == -(-USERS // 7)
    assert main(command(run, tmp_path)) == 0
    assert contents(tmp_path) == whole
    table = pd.read_parquet(tmp_path)
    expected = Recommender.load(run).recommend(k=5)
    assert list(table["item_id"]) == list(expected["item"])
    assert list(table["user_id"]) == list(expected["id"])
    assert table["score"].to_numpy() == pytest.approx(expected["score"].to_numpy(), abs=1e-5)


def test_shares_of_a_scheduler(run: Path, whole: dict[str, bytes], tmp_path, capsys) -> None:
    assert main(command(run, tmp_path, "--part", "2/2")) == 0
    assert f"{len(whole)} parts, 5 parts are missing" in capsys.readouterr().out
    assert list(contents(tmp_path)) == list(whole)[1::2]
    assert main(command(run, tmp_path, "--part", "1/2")) == 0
    assert contents(tmp_path) == whole and "complete" in capsys.readouterr().out


def test_another_job_is_refused(run: Path, trained, tmp_path, refused, capsys) -> None:
    assert main(command(run, tmp_path, "--part", "1/9")) == 0
    written = contents(tmp_path)
    refused(command(run, tmp_path, "--because", 1), "holds parts of another job: because was 0")
    refused(command(trained("PosSASRec", seed=5), tmp_path), "another job: model was")
    (tmp_path / "names").write_text("i1\ni2\n")
    refused(command(run, tmp_path, "--items", tmp_path / "names"), "another job: items was")
    (tmp_path / "_job" / "manifest.json").write_text("{}")
    refused(command(run, tmp_path), "another job: model was None")
    (tmp_path / "_job" / "manifest.json").unlink()
    refused(command(run, tmp_path), "holds parts without manifest.json")
    assert contents(tmp_path) == written
    refused(command(run, tmp_path / "x", "--part", "3/2"), "expected a share such as 2/8")
    refused(command(run, tmp_path / "x", "--workers", 0), "workers: expected 1 or more")
    refused(["recommend", str(run), "--workers", "2"], "need --part_rows")
    assert not (tmp_path / "x").exists()


def test_histories_of_parquet(run: Path, tmp_path, refused) -> None:
    """Parts cut across files and row groups; a file that changes meanwhile is another input."""
    table = pd.DataFrame({"items": [[f"i{n % 40}", f"i{n % 7}"] for n in range(50)]})
    folder, out = tmp_path / "histories", tmp_path / "out"
    folder.mkdir()
    table[:30].to_parquet(folder / "a.parquet", row_group_size=8)
    table[30:].to_parquet(folder / "b.parquet", row_group_size=11)
    words = ["recommend", run, "--histories", folder, "--out", out, "--part_rows", 13]
    words = list(map(str, words))
    assert main(words) == 0
    found = pd.read_parquet(out)
    expected = Recommender.load(run).recommend(histories=list(table["items"]))
    assert list(found["item"]) == list(expected["item"])
    assert list(found["id"]) == list(expected["id"].astype(str))
    table[29:].to_parquet(folder / "b.parquet")
    refused(words, "another job: input was")
    (tmp_path / "lines.jsonl").write_text('{"items": ["i1"]}\n')
    words[3] = str(tmp_path / "lines.jsonl")
    refused(words, "parts are read from parquet")


def test_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    """Its task is done by another process; after four kills the command gives up."""
    numbers = list(range(6))
    assert sorted(run_workers(square_but_die_once, str(tmp_path), numbers, 2)) == [
        0, 1, 4, 9, 16, 25
    ]  # fmt: skip
    assert (tmp_path / "died").exists()
    with pytest.raises(PosError, match="^processes were killed 4 times"):
        list(run_workers(die, None, numbers, 2))


def test_the_command_and_a_worker_are_killed(run: Path, tmp_path: Path) -> None:
    """What is written stays, no process is left, and the same command writes the rest."""
    one_user_each = ("--part_rows", 1)
    process = start(run, tmp_path, *one_user_each, "--workers", 2)
    try:
        wait(lambda: process.poll() is not None or contents(tmp_path))
        children = psutil.Process(process.pid).children(recursive=True)
        workers = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
        for worker in workers:
            worker.suspend()
        workers[0].kill()
        process.kill()
        workers[1].resume()
        _, alive = psutil.wait_procs(workers, timeout=60)  # the pipe of the command is closed
    finally:
        process.kill()
        process.communicate()
    assert len(workers) == 2 and not alive
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.glob("part-*")}
    assert 0 < len(kept) < USERS
    (tmp_path / ".part-00059.parquet.abc.tmp").write_bytes(b"half of a part")
    assert main(command(run, tmp_path, *one_user_each)) == 0
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    assert not list(tmp_path.glob(".part*"))
    assert main(command(run, tmp_path / "whole", *one_user_each)) == 0
    assert contents(tmp_path) == contents(tmp_path / "whole")


@pytest.mark.long
def test_a_machine_of_the_cluster_is_lost(run: Path, whole, tmp_path: Path, no_ray) -> None:
    """Its tasks run again on the other one."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        node = cluster.add_node(num_cpus=1)
        process = start(run, tmp_path, "--part_rows", 1, "--address", cluster.address)
        wait(lambda: process.poll() is not None or contents(tmp_path))
        cluster.remove_node(node, allow_graceful=False)
        error = process.communicate()[1]
        assert process.returncode == 0, error
    finally:
        cluster.shutdown()
    assert len(contents(tmp_path)) == USERS
    assert main(command(run, tmp_path / "whole", "--part_rows", 1)) == 0
    assert contents(tmp_path) == contents(tmp_path / "whole")


def test_a_full_disk_is_one_line(run: Path, whole, tmp_path, capsys) -> None:
    """Of this process, and of workers; what is whole stays."""
    size = min(map(len, whole.values())) - 1

    def write_little() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        return main(command(run, tmp_path))

    done = fork(write_little)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "error: cannot write" in done.stderr and "part-00000.parquet" in done.stderr
    assert not contents(tmp_path) and not list(tmp_path.glob(".part*"))
    assert main(command(run, tmp_path)) == 0
    assert contents(tmp_path) == whole


def test_tasks_of_a_cluster(run: Path, whole, tmp_path, cluster, monkeypatch) -> None:
    """Two processes of Ray write all parts; none of them is in Ray's store."""
    import ray

    monkeypatch.setattr(ray, "put", None)
    assert main(command(run, tmp_path, "--address", "auto")) == 0
    assert contents(tmp_path) == whole
    manifest = json.loads((tmp_path / "_job" / "manifest.json").read_text())
    assert (manifest["users"], manifest["parts"]) == (USERS, len(whole))
    assert pq.read_metadata(tmp_path / "part-00000.parquet").num_rows == 35
