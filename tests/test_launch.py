"""Several processes are one run: torch starts them, and the lost are replaced."""

import functools
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from conftest import SCRIPT, wait
from test_trainer import OPTIONS as SIZES
from test_trainer import assert_same, outcome
from torch import Tensor, nn
from torch.distributed.launcher.api import LaunchConfig

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.distributed import Shard, SharedLoss, compute_global_loss
from recbole_pos.errors import StorageError, TrainingError, UsageError
from recbole_pos.experiment import launch
from recbole_pos.experiment.launch import list_gpus
from recbole_pos.experiment.trainer import PosTrainer
from recbole_pos.layers.sampled import SampledLoss
from recbole_pos.layers.scalable import scalable_cross_entropy

EPOCHS = 30
OPTIONS = {
    **{**SIZES, "epochs": EPOCHS, "stopping_step": EPOCHS, "learning_rate": 0.01},
    **{"hidden_dropout_prob": 0.2, "attn_dropout_prob": 0.0},
}

WINDOWS = {**OPTIONS, "hidden_dropout_prob": 0.0, "train_windows": "sliding"}


def start(*command: Any, **more: Any) -> subprocess.Popen:
    words = [sys.executable, *map(str, command)]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True, **more)


def kill_one(process: subprocess.Popen, folder: Path) -> None:
    """Kill the last process that torch has spawned, after three epochs."""
    file = folder / "metrics.jsonl"
    wait(lambda: process.poll() is not None or file.exists() and file.read_text().count("\n") >= 3)
    children = psutil.Process(process.pid).children(recursive=True)
    members = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    os.kill(max(members, key=lambda child: child.create_time()).pid, signal.SIGKILL)


# --- who is lost ---


@pytest.mark.long
def test_a_killed_process_is_replaced(tiny, tmp_path) -> None:
    """The others wait for it, all resume from the last epoch, and find what they would have."""
    given, folder = {**OPTIONS, "data_path": str(tiny)}, tmp_path / "run"
    words = [f"--{key}={value}" for key, value in {**given, "run_dir": folder}.items()]
    process = start(SCRIPT, "run", "-m", "FPARec", "-d", "tiny", *words, "--quiet", "--nproc=3")
    kill_one(process, folder)
    error = process.communicate()[1]
    assert process.returncode == 0 and "Traceback" not in error, error
    assert error.count("(restart 1)\n") == 1
    how = {"nproc": 3, "verbose": False}
    recbole_pos.run("FPARec", "tiny", None, given, tmp_path / "whole", **how)
    assert_same(folder, tmp_path / "whole")


# --- what goes wrong in one of them ---


def forking(**settings: Any) -> LaunchConfig:
    """Processes that are forked from this one need not import torch again."""
    return LaunchConfig(**settings, start_method="fork")


def test_an_error_of_one_is_the_error_of_all(tiny, tmp_path, monkeypatch, caplog, capfd) -> None:
    """The other, which waits for its gradients, is ended; none trains again."""
    monkeypatch.setattr(launch, "LaunchConfig", forking)
    handler = signal.getsignal(signal.SIGINT)
    given = {**OPTIONS, "data_path": str(tiny)}
    how = {"nproc": 2, "verbose": False}

    def fail(trainer: PosTrainer, *_: Any, **__: Any) -> None:
        if trainer.shard.rank == 1:
            raise StorageError("the disk is full")
        time.sleep(60)

    monkeypatch.setattr(PosTrainer, "_finish_epoch", fail)
    with pytest.raises(StorageError, match="^the disk is full$"):
        recbole_pos.run("FPARec", "tiny", None, given, tmp_path / "x", **how)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not warnings and not capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_process_that_is_lost_again_and_again_ends_the_run(tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(launch, "LaunchConfig", forking)
    monkeypatch.setattr(launch, "MAX_RESTARTS", 1)
    monkeypatch.setattr(PosTrainer, "_finish_epoch", lambda *_, **__: os.kill(os.getpid(), 9))
    given = {**OPTIONS, "data_path": str(tiny)}
    with pytest.raises(TrainingError, match="lost after 1 restarts: Signal 9"):
        recbole_pos.run("FPARec", "tiny", None, given, tmp_path, nproc=2, verbose=False)


# --- who starts them ---


@pytest.mark.long
def test_it_starts_from_a_notebook_and_not_from_a_script_without_a_guard(tiny, tmp_path) -> None:
    """What has no file need not be imported again; a script is warned once."""
    given = {**OPTIONS, "data_path": str(tiny), "epochs": 1}
    code = "import recbole_pos; recbole_pos.run('FPARec', 'tiny', nproc=2, verbose=False, "
    code += f"config_dict={given!r})"
    assert start("-c", code, cwd=tmp_path).wait() == 0
    (tmp_path / "script.py").write_text(code)
    process = start("script.py", cwd=tmp_path)
    error = process.communicate()[1]
    assert process.returncode == 1
    assert error.count("recbole_pos.run must stand under `if __name__") == 1


def test_each_process_has_a_gpu_of_its_own() -> None:
    """Each has one of those that gpu_id names, of which there must be enough."""
    config = PosConfig("FPARec", "ml-100k", None, {"gpu_id": "3, 5"})
    assert list_gpus(config, 2) == ["", ""]  # this machine has none
    config["device"] = torch.device("cuda")
    assert list_gpus(config, 2) == ["3", "5"]
    with pytest.raises(UsageError, match="^gpu_id: names 2 GPUs for 3 processes"):
        list_gpus(config, 3)


# --- what they find together ---


@pytest.mark.parametrize(
    "model", ["FPARec", pytest.param("GRU4Rec", marks=pytest.mark.long)]
)  # packed windows, some events only context; rows by RecBole's loader
def test_two_processes_take_the_steps_of_one(tiny, tmp_path, monkeypatch, model) -> None:
    """Up to rounding, without dropout; the last epoch is trained by one process again."""
    monkeypatch.setattr(launch, "LaunchConfig", forking)
    given = {"MAX_ITEM_LIST_LENGTH": 12, "learning_rate": 0.01, "train_batch_size": 8}
    given |= {"dropout_prob": 0.0} if model == "GRU4Rec" else WINDOWS
    given["data_path"] = str(tiny)
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, nproc, epochs in ((one, 1, 3), (two, 2, 2)):
        more = {"run_dir": folder, "nproc": nproc, "verbose": False}
        recbole_pos.run(model, "tiny", None, {**given, "epochs": epochs}, **more)
    recbole_pos.run(resume=two, config_dict={"epochs": 3}, verbose=False)
    (weights, epochs, result), (others, other_epochs, other_result) = outcome(one), outcome(two)
    torch.testing.assert_close(dict(others), dict(weights), rtol=1e-2, atol=2e-4)
    for line, other in zip(epochs, other_epochs, strict=True):
        assert other["loss"] == pytest.approx(line["loss"], rel=1e-4)
        assert other["valid"] == pytest.approx(line["valid"], abs=0.02)
    assert other_result["test"] == pytest.approx(result["test"], abs=0.02)


@pytest.mark.parametrize("options", [{}, {"valid_users": 20}], ids=str)
def test_every_target_is_ranked_once(experiment, monkeypatch, options) -> None:
    """By one of the processes; of a sample of users, it is the same for all of them."""
    rows = []
    for rank in range(3):
        monkeypatch.setattr("recbole_pos.data.loaders.current_shard", lambda r=rank: Shard(r, 3))
        loader = experiment("FPARec", eval_batch_size=7, **options).loaders["valid"]
        rows += [row for batch in loader for row in batch[0]["target_event"].tolist()]
    monkeypatch.undo()
    alone = experiment("FPARec", **options).loaders["valid"]
    assert sorted(rows) == [row for batch in alone for row in batch[0]["target_event"].tolist()]


def test_what_processes_cannot_share_is_refused(experiment, monkeypatch) -> None:
    """Models whose sequences or targets meet, or that have no gradients."""
    for module in ("distributed", "data.loaders"):
        monkeypatch.setattr(f"recbole_pos.{module}.current_shard", lambda: Shard(0, 2))
    for model, options in (
        ("AttrFormer", {"cross_sequence": "time_respecting"}),
        ("PosSASRec", {"loss_type": "SCE", "target_window": 2}),
        ("Pop", {}),
    ):
        with pytest.raises(UsageError, match="^nproc: "):
            experiment(model, **options)

    # a process without a target would leave the others waiting for its metrics
    monkeypatch.setattr("recbole_pos.data.loaders.current_shard", lambda: Shard(0, 10**6))
    with pytest.raises(UsageError, match="^nproc: 1000000 processes"):
        experiment("FPARec")


SIZE = 2


class Parts(nn.Module):
    """Parameters of every kind that a step may find."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.sometimes, self.never = (nn.Linear(3, 1) for _ in range(3))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)

    def loss(self, batch: tuple[Tensor, bool]) -> tuple[Tensor, Tensor]:
        """Two losses, with weights; the last of the batch says whether all is used."""
        x, all_used = batch
        x = self.frozen(self.norm(x))
        more = self.sometimes(x) if all_used else x.new_zeros(())
        return self.used(x).square().mean(), 0.25 * more.sum()


def require_summed_gradients(rank: int) -> None:
    """Gradients of a shared loss are the sums of what each process finds without it."""
    torch.manual_seed(0)
    shared, own = Parts(), Parts()
    own.load_state_dict(shared.state_dict())
    loss = SharedLoss(shared, shared.loss)
    for step in range(3):
        torch.manual_seed(100 * step + rank)
        # all is used in the second step in one process alone, in the third in none
        batch = torch.randn(4, 3), step == 0 or (step == 1 and rank == 0)
        for model, function in ((shared, loss), (own, own.loss)):
            model.zero_grad()
            sum(function(batch)).backward()
        for (name, found), alone in zip(shared.named_parameters(), own.parameters(), strict=True):
            expected = torch.zeros(alone.shape) if alone.grad is None else alone.grad.clone()
            dist.all_reduce(expected)
            summed = torch.zeros(alone.shape) if found.grad is None else found.grad
            torch.testing.assert_close(summed, expected, msg=f"{name}, step {step}")
    first = own.norm.running_mean.clone()
    dist.broadcast(first, 0)
    assert torch.equal(shared.norm.running_mean, first) == (rank == 0)
    loss.broadcast_buffers()
    assert torch.equal(shared.norm.running_mean, first)


def require_the_losses_of_one_process(rank: int) -> None:
    """Values and gradients of SCE and in_batch, in parts and by one process.

    A batch of one row leaves a process with a row that is only lent.
    """
    sizes = {"n_buckets": 3, "bucket_size_x": 2, "bucket_size_y": 6}
    by_class: Any = SampledLoss("in_batch", torch.ones(30), logq_correction="refined")
    buckets = functools.partial(scalable_cross_entropy, **sizes, mix_x=False)
    mixed = functools.partial(scalable_cross_entropy, **sizes, mix_x=True)
    for rows, alone in ((7, buckets), (7, mixed), (1, buckets), (7, by_class)):
        torch.manual_seed(rows)
        encoder, items = nn.Linear(4, 4), nn.Embedding(30, 4)
        model = nn.ModuleList([encoder, items])
        x, targets = torch.randn(rows, 4), torch.randint(1, 30, (rows,))
        shard = Shard(rank, SIZE)

        def compute(loss: Any, index: Tensor, e=encoder, i=items, x=x, t=targets) -> Tensor:
            return loss(e(x[index]), i.weight, t[index])

        in_parts = functools.partial(compute_global_loss, alone, shard)
        shared = SharedLoss(model, functools.partial(compute, in_parts))
        torch.manual_seed(50 + rank)
        value = shared(shard.take(torch.arange(rows))) * shard.weight
        value.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        torch.manual_seed(50)
        torch.manual_seed(int(torch.randint(2**62, ())))  # what the first process drew
        expected = compute(alone, torch.cat([torch.arange(rows)[of::SIZE] for of in range(SIZE)]))
        expected.backward()
        total = value.detach()
        dist.all_reduce(total)
        torch.testing.assert_close(total, expected.detach())
        torch.testing.assert_close(gradients, [p.grad for p in model.parameters()])


def _member(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/group", rank=rank, world_size=SIZE)
    require_summed_gradients(rank)
    require_the_losses_of_one_process(rank)
    dist.destroy_process_group()


def test_two_processes_share_gradients_and_losses(tmp_path) -> None:
    """Forked from this one: they need not import torch again."""
    torch.multiprocessing.start_processes(_member, (tmp_path,), SIZE, start_method="fork")


@pytest.mark.long
def test_the_script_of_the_documents_runs_on_two_machines(tiny: Path, tmp_path: Path) -> None:
    """Two launchers that meet at a port are two machines; then one of them resumes alone."""
    page = Path(__file__).parent.parent / "docs" / "scaling.md"
    script = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.S | re.M)[0]
    script = script.replace("/mnt/shared", str(tmp_path)).replace('"shop"', '"tiny"')
    (tmp_path / "dataset").symlink_to(tiny)
    file = tmp_path / "train.py"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def train_on(num_machines: int, epochs: int) -> list[int]:
        file.write_text(script.replace('"epochs": 50', f'"epochs": {epochs}'))
        words = f"--nnodes {num_machines} --nproc_per_node 1 --rdzv_backend c10d"
        words += f" --rdzv_endpoint 127.0.0.1:{port} --local_addr 127.0.0.1"
        command = [sys.executable, "-m", "torch.distributed.run", *words.split(), str(file)]
        machines = [subprocess.Popen(command, cwd=tmp_path) for _ in range(num_machines)]
        return [machine.wait(timeout=300) for machine in machines]

    assert train_on(2, 2) == [0, 0]
    metrics = tmp_path / "runs" / "shop" / "metrics.jsonl"
    assert len(metrics.read_text().splitlines()) == 2
    script = script.replace("run(resume=RUN)", 'run(resume=RUN, config_dict={"epochs": 3})')
    assert train_on(1, 3) == [0]
    assert len(metrics.read_text().splitlines()) == 3
