"""Several processes are one run, who starts them; the missing are named, the lost replaced."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.multiprocessing
from conftest import SCRIPT, wait
from test_trainer import OPTIONS as SIZES
from test_trainer import assert_same, outcome
from torch import Tensor, nn

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config.arguments import RunArguments
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.distributed import Shard, SharedLoss, make_global_loss
from recbole_pos.errors import CheckpointError, TrainingError, UsageError
from recbole_pos.experiment.environment import Rank, find_rank
from recbole_pos.experiment.launch import choose_gpu, find_free_port
from recbole_pos.experiment.rendezvous import Rendezvous
from recbole_pos.layers.sampled import SampledLoss
from recbole_pos.layers.sce import scalable_cross_entropy

EPOCHS = 30
OPTIONS = {
    **{**SIZES, "epochs": EPOCHS, "stopping_step": EPOCHS, "learning_rate": 0.01},
    **{"hidden_dropout_prob": 0.2, "attn_dropout_prob": 0.0},
}


def words(tiny: Path, *more: str, epochs: int = EPOCHS) -> list[str]:
    given = {**OPTIONS, "data_path": tiny, "epochs": epochs, "stopping_step": epochs}
    options = [f"--{key}={value}" for key, value in given.items()]
    return ["-m", "FPARec", "-d", "tiny", *options, "--quiet", *more]


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory) -> Callable[[int], Path]:
    """The run of a number of processes that nothing happens to."""

    @functools.cache
    def train(nproc: int) -> Path:
        folder = tmp_path_factory.mktemp("whole") / "run"
        given = {**OPTIONS, "data_path": str(tiny)}
        recbole_pos.run("FPARec", "tiny", None, given, folder, nproc=nproc, verbose=False)
        return folder

    return train


def start(*command: Any, **more: Any) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *map(str, command)], stderr=subprocess.PIPE, text=True, **more
    )


def kill_one(process: subprocess.Popen, folder: Path, word: str) -> None:
    """The last of its children whose command line has the word, after three epochs."""
    file = folder / "metrics.jsonl"
    wait(lambda: process.poll() is not None or file.exists() and file.read_text().count("\n") >= 3)
    children = psutil.Process(process.pid).children(recursive=True)
    members = [child for child in children if word in " ".join(child.cmdline())]
    os.kill(max(members, key=lambda child: child.create_time()).pid, signal.SIGKILL)


# --- who is lost ---


@pytest.mark.long
@pytest.mark.parametrize("restarts", [3, 0])
def test_one_of_three_is_killed(tiny, tmp_path, whole, restarts) -> None:
    """The others wait for it, all resume from the last epoch, and find what they would have."""
    more = f"--max_restarts={restarts}", f"--run_dir={tmp_path / 'run'}"
    process = start(SCRIPT, *words(tiny, "--nproc=3", *more))
    kill_one(process, tmp_path / "run", "spawn_main")
    error = process.communicate()[1]
    assert "Traceback" not in error
    if not restarts:
        assert process.returncode == 1 and "lost after 0 restarts" in error
        return
    assert process.returncode == 0, error
    assert error.count("(restart 1 of 3)\n") == 1
    assert_same(tmp_path / "run", whole(3))


@pytest.mark.long
def test_one_of_torchrun_is_killed(tiny, tmp_path, whole) -> None:
    """Without a name for the folder: all attempts write to the one of the first."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    process = start(*torchrun, "--max-restarts=1", SCRIPT, *words(tiny), cwd=tmp_path)
    folder = wait(lambda: next(tmp_path.glob("saved/tiny/FPARec/*"), None))
    kill_one(process, folder, str(SCRIPT))
    error = process.communicate()[1]
    assert process.returncode == 0, error
    assert [folder] == list(tmp_path.glob("saved/tiny/FPARec/*"))
    assert_same(folder, whole(2))


# --- who starts them ---


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["by hand", "mpirun"])
def test_two_programs_are_one_run(tiny, tmp_path, whole, launcher) -> None:
    """Two launchers as on two machines, one of which loses a process; two processes of mpirun."""
    port, ends, by_hand = find_free_port(), [], launcher == "by hand"
    for rank in (1, 0):  # in any order
        more, environ = [f"--port={port}", f"--run_dir={tmp_path / 'run'}"], dict(os.environ)
        if by_hand:
            more += ["--nproc=1", "--world_size=2", f"--group_offset={rank}"]
        else:
            args = {"RANK": rank, "LOCAL_RANK": rank, "SIZE": 2, "LOCAL_SIZE": 2}
            environ |= {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in args.items()}
        ends.append(start(SCRIPT, *words(tiny, *more), env=environ))
    if by_hand:
        kill_one(ends[1], tmp_path / "run", "spawn_main")
    errors = [process.communicate()[1] for process in ends]
    assert [process.returncode for process in ends] == [0, 0], errors
    assert [error.count("a process was lost") for error in errors] == [by_hand, by_hand]
    assert_same(tmp_path / "run", whole(2))


@pytest.mark.long
def test_from_a_notebook_and_from_a_script_without_a_guard(tiny, tmp_path) -> None:
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


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "first", "MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "2",
            "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
OMPI = {
    **{f"OMPI_COMM_WORLD_{name}": "2" for name in ("RANK", "LOCAL_RANK")},
    **{f"OMPI_COMM_WORLD_{name}": "3" for name in ("SIZE", "LOCAL_SIZE")},
}
PMI = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
# a batch script has SLURM_NTASKS as well, but not what srun says about a step
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_STEP_NUM_TASKS": "6",
         "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x3)", "SLURM_JOB_ID": "41001",
         "SLURM_STEP_NODELIST": "gpu[07-09],big"}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "args", "expected"),
    [
        (TORCHRUN, {"ip": "here", "port": 7}, (1, 4, 1, 2, "here", 7, 2, True)),
        (OMPI, {}, (2, 3, 2, 3, "localhost", 5678, 0, False)),
        ({**PMI, "MASTER_ADDR": "a"}, {}, (0, 2, 0, 1, "a", 5678, 0, False)),
        (SLURM, {}, (5, 6, 1, 2, "gpu07", 11001, 0, False)),
        ({k: v for k, v in SLURM.items() if "STEP" not in k}, {"nproc": 2}, None),
        ({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}, {"nproc": 2}, None),
        (TORCHRUN, {"nproc": 2}, "--nproc"),
        ({**TORCHRUN, "RANK": "4"}, {}, "RANK=4"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, {}, "WORLD_SIZE"),
        (PMI, {}, "MASTER_ADDR"),
        (TORCHRUN, {"port": "²"}, "--port"),
    ],
)
def test_the_rank_of_a_process(environ, args, expected) -> None:
    """Or what is wrong with its environment."""
    if isinstance(expected, str):
        with pytest.raises(UsageError, match=expected):
            find_rank(environ, RunArguments(**args))
    else:
        found = find_rank(environ, RunArguments(**args))
        assert (found and tuple(vars(found).values())[:8]) == expected


@pytest.mark.parametrize(
    ("gpu_id", "visible", "expected"),
    [
        ("0", "4, 6", "6"),  # the default: what the launcher leaves visible
        ("3,5", "4,6", "5"),
        ("3", "4,6", None),  # fewer than processes
        ("0", "7", "7"),  # a scheduler shows each process its own
        ("", "4,6", ""),
    ],
)
def test_gpu_of_a_process(monkeypatch, gpu_id, visible, expected) -> None:
    """The second of two on its machine."""
    config = PosConfig("FPARec", "ml-100k", None, {"gpu_id": gpu_id})
    rank = find_rank({**TORCHRUN, "CUDA_VISIBLE_DEVICES": visible}, RunArguments())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with nullcontext() if expected is not None else pytest.raises(UsageError, match="^gpu_id"):
        assert choose_gpu(config, rank) == expected


# --- who is missing ---


@pytest.mark.parametrize(
    ("offset", "output"),
    [
        (0, "of 2 processes, 1 did not come to 127.0.0.1:{}"),
        (1, "process 0 is missing: nothing answers at 127.0.0.1:{}"),
        (None, "of 4 processes, 1, 2, 3 did not come to 127.0.0.1:{}"),  # that torchrun started
    ],
)
def test_a_process_that_does_not_come(tiny, tmp_path, monkeypatch, capsys, offset, output) -> None:
    port, folder = find_free_port(), tmp_path / "x"
    more = ["--ip=127.0.0.1", f"--port={port}", "--join_timeout=0.2", f"--run_dir={folder}"]
    if offset is None:
        for name, value in {**TORCHRUN, "RANK": "0", "LOCAL_WORLD_SIZE": "4"}.items():
            if not name.startswith("TORCHELASTIC"):
                monkeypatch.setenv(name, value)
        monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")  # put back afterwards
    else:
        more += ["--nproc=1", "--world_size=2", f"--group_offset={offset}"]
    assert main(["run", *words(tiny, *more)]) == 2
    error = capsys.readouterr().err
    assert output.format(port) in error and "Traceback" not in error
    assert "--group_offset" in error and "--join_timeout" in error and not folder.exists()


def test_a_port_that_another_program_has(tiny, tmp_path, capsys) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        more = ["--nproc=2", f"--port={other.getsockname()[1]}", f"--run_dir={tmp_path / 'x'}"]
        assert main(["run", *words(tiny, *more)]) == 2
    assert "--port: no run can meet at localhost:" in capsys.readouterr().err


def test_the_first_error_of_a_process_is_that_of_the_run() -> None:
    port = find_free_port()
    kept = Rendezvous("localhost", port, True, 0.1)
    for error in (CheckpointError("damaged"), ValueError("later")):
        with pytest.raises(type(error)), kept.joined(Rank(0, 1, 0, 1, "localhost", port)):
            raise error
    found = kept.read_error()
    assert type(found) is CheckpointError and str(found) == "damaged"
    other = Rendezvous("localhost", port, False, 1)
    del kept
    with pytest.raises(TrainingError, match=f"localhost:{port} is gone"):
        other.read_error()


# --- what they find together ---


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("FPARec", {"train_windows": "sliding"}),  # packed windows, some events only context
        pytest.param(  # rows by RecBole's loader
            "GRU4Rec", {"dropout_prob": 0.0, "train_batch_size": 8}, marks=pytest.mark.long
        ),
    ],
)
def test_two_processes_take_the_steps_of_one(tiny, tmp_path, monkeypatch, model, options) -> None:
    """Up to rounding, without dropout; the last epoch is trained by one process again."""
    start = functools.partial(torch.multiprocessing.start_processes, start_method="fork")
    monkeypatch.setattr(torch.multiprocessing, "start_processes", start)
    given = {"MAX_ITEM_LIST_LENGTH": 12, "learning_rate": 0.01, "data_path": str(tiny)}
    if model == "FPARec":
        given |= {**OPTIONS, "hidden_dropout_prob": 0.0}
    given |= options
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


def test_every_target_is_ranked_once(experiment, monkeypatch) -> None:
    rows = []
    for rank in range(3):
        monkeypatch.setattr("recbole_pos.data.loaders.current_shard", lambda r=rank: Shard(r, 3))
        loader = experiment("FPARec", eval_batch_size=7).loaders["valid"]
        rows += [row for batch in loader for row in batch[0]["target_event"].tolist()]
    monkeypatch.undo()
    alone = experiment("FPARec").loaders["valid"]
    assert sorted(rows) == alone._dataset.inter_feat.target.tolist()


def test_a_small_batch_has_no_borrowed_weight() -> None:
    shard = Shard(2, 3)
    assert shard.take(np.array([5, 9])).tolist() == [5] and shard.weight == 0
    assert shard.take(np.arange(7), np.full(7, 3)).tolist() == [2, 5] and shard.weight == 6 / 21
    assert Shard().take([1, 2, 3]) == [1, 2, 3]


def test_what_processes_cannot_share(experiment, monkeypatch) -> None:
    """Models whose sequences or targets meet, or that have no gradients; too few targets."""
    for model, options, size in (
        ("AttrFormer", {"cross_sequence": "time_respecting"}, 2),
        ("PosSASRec", {"loss_type": "SCE", "target_window": 2}, 2),
        ("Pop", {}, 2),
        ("FPARec", {}, 10**6),  # one without a row would leave the others waiting for its metrics
    ):
        for module in ("distributed", "data.loaders"):
            shard = Shard(0, size)
            monkeypatch.setattr(f"recbole_pos.{module}.current_shard", lambda shard=shard: shard)
        with pytest.raises(UsageError, match="^nproc: "):
            experiment(model, **options)


def test_arguments_that_do_not_fit(tiny) -> None:
    for option, given in {
        "world_size": {"nproc": 4, "world_size": 2},
        "port": {"nproc": 2, "port": ""},
        "group_offset": {"nproc": 2, "world_size": 4, "group_offset": 3},
        "max_restarts": {"max_restarts": -1},
        "join_timeout": {"join_timeout": float("nan")},
    }.items():
        with pytest.raises(UsageError, match=f"^--{option}: "):
            recbole_pos.run("FPARec", "tiny", config_dict={"data_path": str(tiny)}, **given)


SIZE = 2


class Parts(nn.Module):
    """Parameters of every kind that a step may find."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.sometimes, self.never = (nn.Linear(3, 1) for _ in range(3))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)
        self.rows = nn.Embedding(5, 3, sparse=True)

    def loss(self, batch: tuple[Tensor, Tensor, bool]) -> tuple[Tensor, Tensor]:
        """Two losses, with weights; the last of the batch says whether all is used."""
        x, rows, all_used = batch
        x = self.frozen(self.norm(x)) + self.rows(rows)
        more = self.sometimes(x) if all_used else x.new_zeros(())
        return self.used(x).square().mean(), 0.25 * more.sum()


def summed_gradients(rank: int) -> dict[str, Any]:
    """Of three steps, as they come from a shared loss; and each process's own, without it."""
    torch.manual_seed(0)
    shared, own = Parts(), Parts()
    own.load_state_dict(shared.state_dict())
    loss = SharedLoss(shared, shared.loss)
    found: dict[str, Any] = {"shared": [], "own": []}
    for step in range(3):
        torch.manual_seed(100 * step + rank)
        # in the second step in one process alone, in the third in none
        batch = torch.randn(4, 3), torch.randint(5, (4,)), step == 0 or (step == 1 and rank == 0)
        for name, model, function in (("shared", shared, loss), ("own", own, own.loss)):
            model.zero_grad()
            sum(function(batch)).backward()
            gradients = {n: p.grad for n, p in model.named_parameters()}
            dense = {n: g if g is None else g.to_dense().clone() for n, g in gradients.items()}
            found[name].append(dense)
    loss.broadcast_buffers()
    return {**found, "buffers": dict(shared.named_buffers()), "before": dict(own.named_buffers())}


def sampled_losses(rank: int) -> list[dict[str, Any]]:
    """Values and gradients of SCE and in_batch, in parts and by one process.

    A batch of one row leaves a process with a row that is only lent.
    """
    found = []
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

        together = functools.partial(compute, make_global_loss(alone, shard))
        shared = SharedLoss(model, together)
        torch.manual_seed(50 + rank)
        value = shared(shard.take(torch.arange(rows))) * shard.weight
        value.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        torch.manual_seed(50)
        torch.manual_seed(int(torch.randint(2**62, ())))  # what the first process drew
        expected = compute(alone, torch.cat([torch.arange(rows)[of::SIZE] for of in range(SIZE)]))
        expected.backward()
        whole = [expected.detach(), *(p.grad for p in model.parameters())]
        found.append({"value": value.detach(), "gradients": gradients, "whole": whole})
    return found


def _member(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    place = Rank(rank, SIZE, rank, SIZE, "localhost", port)
    with Rendezvous("localhost", port, rank == 0, 60).joined(place):
        torch.save((summed_gradients(rank), sampled_losses(rank)), folder / f"{rank}.pt")


def test_what_two_processes_share(tmp_path) -> None:
    """Forked from this one: they need not import torch again."""
    torch.multiprocessing.start_processes(
        _member, (find_free_port(), tmp_path), SIZE, start_method="fork"
    )
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(SIZE)]
    _require_sums([gradients for gradients, _ in found])
    for parts in zip(*(losses for _, losses in found), strict=True):
        value, *gradients = parts[0]["whole"]
        torch.testing.assert_close(sum(part["value"] for part in parts), value)
        for part in parts:
            torch.testing.assert_close(part["gradients"], gradients)


def _require_sums(found: list[dict[str, Any]]) -> None:
    """Parameters may be frozen, sparse, never used, or used in some processes of some steps."""
    for step in range(3):
        own = [one["own"][step] for one in found]
        for name in own[0]:
            parts = [part[name] for part in own if part[name] is not None]
            for one in found:
                shared = one["shared"][step][name]
                if parts:
                    torch.testing.assert_close(shared, sum(parts), msg=f"{name}, step {step}")
                else:
                    assert shared is None or not shared.any(), (name, step)
        assert any(part["sometimes.weight"] is None for part in own) is (step > 0)
    for name, buffer in found[0]["before"].items():
        assert all(torch.equal(one["buffers"][name], buffer) for one in found)
    means = [one["before"]["norm.running_mean"] for one in found]
    assert not torch.equal(*means)  # each would have gone its own way
