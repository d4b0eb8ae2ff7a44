"""A study on two machines, one of which dies, and what they share. Real raylets."""

from __future__ import annotations

import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from conftest import wait
from ray.cluster_utils import Cluster

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.runs.storage import Mirror
from recbole_pos.runs.worker import _folders

LAST = 10
BASE = {
    **{"model": "PosSASRec", "hidden_size": 8, "inner_size": 8, "n_layers": 1, "epochs": LAST},
    **{"MAX_ITEM_LIST_LENGTH": 8, "train_batch_size": 16, "stopping_step": 100},
}


def slow_epochs(file: str) -> Callable[[], None]:
    """A function that makes a worker take its time for an epoch, and note it."""

    def hook() -> None:
        import os
        import time

        import ray

        import recbole_pos  # noqa: F401
        from recbole_pos.experiment.trainer import PosTrainer

        train = PosTrainer._train_epoch

        def _train_epoch(self, loader, epoch, **kwargs):
            line = train(self, loader, epoch, **kwargs)
            node = ray.get_runtime_context().get_node_id()
            name = f"{'-'.join(self.config['position'])}-{self.config['seed']}"
            with open(file, "a") as stream:
                stream.write(f"{name} {epoch} {node} {os.getpid()}\n")
            time.sleep(0.4)
            return line

        PosTrainer._train_epoch = _train_epoch

    return hook


@pytest.fixture
def two_machines(no_ray: None) -> Iterator[Cluster]:
    """Two raylets on loopback, one CPU each."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    yield made
    ray.shutdown()
    made.shutdown()


def trained(file: Path) -> dict[str, list[tuple[int, str, int]]]:
    """Fit -> epochs it trained, where, and in which process."""
    found = defaultdict(list)
    for line in file.read_text().splitlines() if file.exists() else []:
        name, epoch, node, pid = line.split()
        found[name].append((int(epoch), node, int(pid)))
    return found


@pytest.mark.long
@pytest.mark.parametrize("storage", [None, "file://{}/far"])
def test_a_node_is_killed_in_the_middle(
    two_machines: Cluster, tiny: Path, tmp_path: Path, storage: str | None
) -> None:
    log = tmp_path / "log"
    hook = {"worker_process_setup_hook": slow_epochs(str(log))}
    ray.init(two_machines.address, runtime_env=hook, log_to_driver=False)
    other = next(iter(two_machines.worker_nodes))

    def kill() -> None:
        """When a fit is six epochs along on the other machine, with a storage or without."""
        node = other.node_id
        wait(lambda: any(e >= 5 for es in trained(log).values() for e, n, _ in es if n == node))
        os.kill(other.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        for pid in {pid for es in trained(log).values() for _, n, pid in es if n == node}:
            os.kill(pid, signal.SIGKILL)  # a machine takes its processes along

    killer = threading.Thread(target=kill)
    killer.start()
    rows = {"NoPE": {"position": ["nope"]}, "RoPE": {"position": ["rope"]}}
    rows["RoPE + kernel"] = {"attach": {"to": "RoPE", "schemes": ["kernel"]}}
    study = {"dataset": "tiny", "base": {**BASE, "data_path": str(tiny)}, "rows": rows, "seeds": 1}
    place = storage and storage.format(tmp_path)
    found = recbole_pos.compare(study, run_dir=tmp_path / "s", storage=place, verbose=False)
    killer.join()
    epochs = trained(log)
    assert set(found.runs["status"]) == {"done"} and set(found.runs["epochs"]) == {LAST}
    assert len({node for es in epochs.values() for _, node, _ in es}) == 2
    (moved,) = [es for es in epochs.values() if len({node for _, node, _ in es}) > 1]
    first = [e for e, node, _ in moved if node == other.node_id]
    second = [e for e, node, _ in moved if node != other.node_id]
    assert 1 <= second[0] <= first[-1] + 1  # from its last checkpoint, not from the start
    assert sorted({*first, *second}) == list(range(LAST))
    runs = list(tmp_path.glob("s/runs/*"))
    for path in runs:  # wherever they were trained
        assert {"result.json", "test_ranks.parquet", "checkpoint.pt"} <= set(os.listdir(path))
    far = {path.name for path in tmp_path.glob("far/s/*")}
    assert far == ({path.name for path in runs} if storage else set())
    assert recbole_pos.compare(tmp_path / "s", verbose=False).runs.equals(found.runs)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_copy_has_whole_files_and_the_newest(tmp_path: Path, scheme: str) -> None:
    run, place = RunFolder(tmp_path / "run"), f"{scheme}{tmp_path}/far/run"
    run.path.mkdir()
    run.write_config({"model": "FPARec"})
    Path(run.path / ".config.yaml.tmp").write_text("half")
    mirror = Mirror(run, place)
    with mirror.kept():
        run.checkpoint.write_bytes(b"one")
        wait(lambda: (tmp_path / "far" / "run" / "checkpoint.pt").is_file())
        run.checkpoint.write_bytes(b"two")
    assert sorted(os.listdir(tmp_path / "far" / "run")) == ["checkpoint.pt", "config.yaml"]
    (tmp_path / "far" / "run" / "result.json.part").write_text("half")
    other = RunFolder(tmp_path / "other")
    Mirror(other, place).fetch()
    assert other.checkpoint.read_bytes() == b"two"
    assert sorted(os.listdir(other.path)) == ["checkpoint.pt", "config.yaml"]


def test_a_storage_that_cannot_be_is_told(cluster, tiny: Path, tmp_path: Path, capsys) -> None:
    """Before anything is trained, in one line, by compare as by tune."""
    (tmp_path / "file").touch()
    what = f"-m FPARec -d tiny --data_path={tiny} --run_dir={tmp_path / 'out'}".split()
    for storage in ("nowhere://bucket/x", str(tmp_path / "file" / "x")):
        for command in (["compare", *what], ["tune", *what, "--num_samples=1"]):
            assert main([*command, "--storage", storage]) == 2
            printed = capsys.readouterr().err.strip()
            assert printed.startswith(f"error: --storage: cannot use {storage!r}: ")
            assert "\n" not in printed


def test_a_machine_that_does_not_see_the_folder_is_told_of(tmp_path: Path) -> None:
    with _folders(None) as folder_at, pytest.raises(UsageError, match="does not see .*--storage"):
        folder_at(str(tmp_path / "elsewhere" / "run"))
