"""Recommendations in parts: the same from any processes, after a kill, and never mixed."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
from conftest import wait

from recbole_pos.cli.main import main
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
def whole(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the parts that one process writes."""
    out = tmp_path_factory.mktemp("whole")
    assert main(command(run, out)) == 0
    return out


def test_parts_are_the_table_of_recommend(run: Path, whole: Path) -> None:
    """And pandas reads the folder as one table."""
    assert len(contents(whole)) == -(-USERS // 7)
    table = pd.read_parquet(whole)
    expected = Recommender.load(run).recommend(k=5)
    assert list(table["item_id"]) == list(expected["item"])
    assert list(table["user_id"]) == list(expected["id"])
    assert table["score"].to_numpy() == pytest.approx(expected["score"].to_numpy(), abs=1e-5)


def test_shares_of_a_scheduler(run: Path, whole: Path, tmp_path, capsys) -> None:
    assert main(command(run, tmp_path, "--part", "2/2")) == 0
    assert "9 parts, 5 parts are missing" in capsys.readouterr().out
    assert list(contents(tmp_path)) == list(contents(whole))[1::2]
    assert main(command(run, tmp_path, "--part", "1/2")) == 0
    assert contents(tmp_path) == contents(whole) and "complete" in capsys.readouterr().out


def test_another_job_is_refused(run: Path, trained, tmp_path, refused, capsys) -> None:
    assert main(command(run, tmp_path, "--part", "1/9")) == 0
    written = contents(tmp_path)
    refused(command(run, tmp_path, "--because", 1), "holds parts of another job: because was 0")
    refused(command(trained("PosSASRec", seed=5), tmp_path), "another job: model was")
    (tmp_path / "names").write_text("i1\ni2\n")
    refused(command(run, tmp_path, "--items", tmp_path / "names"), "another job: items was")
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


def start(run: Path, out: Path, *more: Any) -> subprocess.Popen:
    words = [sys.executable, "-m", "recbole_pos", *command(run, out, *more)]
    return subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


@pytest.mark.parametrize("victim", ["worker", "command"])
def test_after_a_kill_the_rest_is_written(
    run: Path, whole: Path, tmp_path: Path, victim: str
) -> None:
    """What is written stays, and no process is left."""
    one_user_each = ("--part_rows", 1)
    process = start(run, tmp_path, *one_user_each, "--workers", 2)
    try:
        wait(lambda: process.poll() is not None or contents(tmp_path))
        children = psutil.Process(process.pid).children(recursive=True)
        workers = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
        for worker in workers:
            worker.suspend()
        (workers[0] if victim == "worker" else process).kill()
        for worker in workers[victim == "worker" :]:
            worker.resume()
        _, alive = psutil.wait_procs(workers, timeout=60)  # the pipe of the command is closed
    finally:
        if victim == "command":
            process.kill()
        error = process.communicate()[1]
    assert len(workers) == 2 and not alive
    if victim == "worker":
        assert process.returncode == 1 and error.startswith("error: a process was killed"), error
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.glob("part-*")}
    assert 0 < len(kept) < USERS
    (tmp_path / ".part-00059.parquet.abc.tmp").write_bytes(b"half of a part")
    assert main(command(run, tmp_path, *one_user_each)) == 0
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    assert not list(tmp_path.glob(".part*"))
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path), pd.read_parquet(whole))


@pytest.mark.long
def test_a_machine_of_the_cluster_is_lost(run: Path, whole: Path, tmp_path: Path, no_ray) -> None:
    """Its parts are written by the other one."""
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
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path), pd.read_parquet(whole))


def test_cluster_tasks(run: Path, whole: Path, tmp_path, cluster, monkeypatch, refused) -> None:
    """Processes of Ray write the parts, which are not in Ray's store; their errors are one line."""
    import ray

    monkeypatch.setattr(ray, "put", None)
    monkeypatch.chdir(run.parent)
    assert main(command(Path(run.name), tmp_path, "--address", "auto")) == 0
    assert contents(tmp_path) == contents(whole)
    part = tmp_path / "part-00001.parquet"
    part.unlink()
    part.mkdir()
    refused(command(run, tmp_path, "--address", "auto"), f"cannot write {part}")
