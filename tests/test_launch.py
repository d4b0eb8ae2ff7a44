"""Several processes are one run, who starts them; the missing are named, the lost replaced."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from conftest import wait

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config.arguments import RunArguments
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.distributed import Shard
from recbole_pos.errors import CheckpointError, TrainingError, UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.build import prepare
from recbole_pos.experiment.environment import Rank, rank_here
from recbole_pos.experiment.launch import choose_gpu, free_port
from recbole_pos.experiment.rendezvous import Rendezvous

SCRIPT = Path(__file__).parent.parent / "run_recbole_pos.py"
EPOCHS = 30
OPTIONS = {
    "hidden_size": 16,
    "inner_size": 16,
    "MAX_ITEM_LIST_LENGTH": 12,
    "train_batch_size": 16,
    "hidden_dropout_prob": 0.2,
    "attn_dropout_prob": 0.0,
    "learning_rate": 0.01,
}


def words(tiny: Path, *more: str, epochs: int = EPOCHS) -> list[str]:
    """Of the command line, after the program."""
    given = {**OPTIONS, "data_path": tiny, "epochs": epochs, "stopping_step": epochs}
    options = [f"--{key}={value}" for key, value in given.items()]
    return ["-m", "FPARec", "-d", "tiny", *options, "--quiet", *more]


def outcome(folder: Path) -> tuple[dict, list, dict]:
    """Of a finished run: weights, what each epoch found, the result."""
    weights = checkpoint.load(folder / "checkpoint.pt")["weights"]["state_dict"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [(line["epoch"], line["loss"], line["valid"]) for line in lines]
    return weights, found, json.loads((folder / "result.json").read_text())["test"]


def assert_same(folder: Path, expected: tuple[dict, list, dict]) -> None:
    """Bit for bit."""
    weights, found, test = outcome(folder)
    assert (found, test) == expected[1:]
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected[0].items())


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple]:
    """What a number of processes find that nothing happens to."""
    found: dict[int, tuple] = {}

    def of(nproc: int) -> tuple[dict, list, dict]:
        if nproc not in found:
            folder = tmp_path_factory.mktemp("whole") / "run"
            given = {**OPTIONS, "data_path": str(tiny), "epochs": EPOCHS, "stopping_step": EPOCHS}
            recbole_pos.run("FPARec", "tiny", None, given, folder, nproc=nproc, verbose=False)
            found[nproc] = outcome(folder)
        return found[nproc]

    return of


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
def test_one_of_three_is_killed(tiny: Path, tmp_path: Path, whole: Callable) -> None:
    """The others wait for it, all resume from the last epoch, and find what they would have."""
    folder = tmp_path / "run"
    process = start(SCRIPT, *words(tiny, "--nproc=3", f"--run_dir={folder}"))
    kill_one(process, folder, "spawn_main")
    error = process.communicate()[1]
    assert process.returncode == 0, error
    output = "a process was lost; all resume from the last checkpoint (restart 1 of 3)\n"
    assert error.count(output) == 1 and "Traceback" not in error
    assert_same(folder, whole(3))


@pytest.mark.long
def test_one_of_torchrun_is_killed(tiny: Path, tmp_path: Path, whole: Callable) -> None:
    """Without a name for the folder: all attempts write to the one of the first."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    process = start(*torchrun, "--max-restarts=1", SCRIPT, *words(tiny), cwd=tmp_path)
    folder = wait(lambda: next(tmp_path.glob("saved/tiny/FPARec/*"), None))
    kill_one(process, folder, str(SCRIPT))
    error = process.communicate()[1]
    assert process.returncode == 0, error
    assert [folder] == list(tmp_path.glob("saved/tiny/FPARec/*"))
    assert_same(folder, whole(2))


@pytest.mark.long
def test_one_is_lost_too_often(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    more = "--nproc=2", "--max_restarts=0", f"--run_dir={folder}"
    process = start(SCRIPT, *words(tiny, *more, epochs=5000))
    kill_one(process, folder, "spawn_main")
    error = process.communicate()[1]
    assert process.returncode == 1
    assert (
        "lost after 0 restarts (process 1 terminated with signal SIGKILL)" in error
        and "Traceback" not in error
    )


# --- who starts them ---


def launchers(tiny: Path, folder: Path) -> list[subprocess.Popen]:
    port, ends = free_port(), []
    for offset, name in ((1, "other"), (0, folder.name)):  # in any order
        more = "--nproc=1", "--world_size=2", f"--group_offset={offset}", f"--port={port}"
        where = f"--run_dir={folder.with_name(name)}"
        ends.append(start(SCRIPT, *words(tiny, *more, where)))
    return ends


def mpirun(tiny: Path, folder: Path) -> list[subprocess.Popen]:
    port, ends = free_port(), []
    for rank in range(2):
        args = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
        environ = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in args.items()}
        more = f"--port={port}", f"--run_dir={folder}"
        ends.append(start(SCRIPT, *words(tiny, *more), env={**os.environ, **environ}))
    return ends


@pytest.mark.long
@pytest.mark.parametrize(("begin", "again"), [(launchers, 1), (mpirun, 0)])
def test_two_programs_are_one_run(
    tiny: Path, tmp_path: Path, whole: Callable, begin: Callable, again: int
) -> None:
    """Two launchers as on two machines, one of which loses a process; two processes of mpirun."""
    ends = begin(tiny, tmp_path / "run")
    if again:
        kill_one(ends[0], tmp_path / "run", "spawn_main")
    errors = [process.communicate()[1] for process in ends]
    assert [process.returncode for process in ends] == [0, 0], errors
    assert [error.count("a process was lost") for error in errors] == [again, again]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert_same(tmp_path / "run", whole(2))


@pytest.mark.long
def test_from_a_notebook_and_from_a_script_without_a_guard(tiny: Path, tmp_path: Path) -> None:
    """What has no file need not be imported again; a script is warned once."""
    given = {**OPTIONS, "data_path": str(tiny), "epochs": 1}
    code = f"""import recbole_pos
found = recbole_pos.run("FPARec", "tiny", None, {given!r}, "run", nproc=2, verbose=False)
print(found.epochs)
"""
    assert subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, text=True) == "1\n"
    (tmp_path / "script.py").write_text(code.replace('"run"', '"other"'))
    process = start("script.py", cwd=tmp_path)
    error = process.communicate()[1]
    assert process.returncode == 1
    assert error.count("recbole_pos.run must stand under `if __name__") == 1


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "first", "MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "2",
            "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
OMPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3",
        "OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}  # fmt: skip
PMI = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
# a batch script has SLURM_NTASKS as well, but not what srun says about a step
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_STEP_NUM_TASKS": "6",
         "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x3)", "SLURM_JOB_ID": "41001",
         "SLURM_STEP_NODELIST": "gpu[07-09],big"}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "args", "expected"),
    [
        (TORCHRUN, {}, (1, 4, 1, 2, "first", 29500, 2, True)),
        (TORCHRUN, {"ip": "here", "port": 7}, (1, 4, 1, 2, "here", 7, 2, True)),
        (OMPI, {}, (2, 3, 2, 3, "localhost", 5678, 0, False)),
        ({**PMI, "MASTER_ADDR": "a"}, {}, (0, 2, 0, 1, "a", 5678, 0, False)),
        (SLURM, {}, (5, 6, 1, 2, "gpu07", 11001, 0, False)),
        ({**SLURM, **OMPI, "SLURM_STEP_NODELIST": "n1,n2"}, {},
         (2, 3, 2, 3, "n1", 11001, 0, False)),
        ({k: v for k, v in SLURM.items() if "STEP" not in k}, {"nproc": 2}, None),
        ({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}, {"nproc": 2}, None),
    ],
)  # fmt: skip
def test_the_rank_of_a_process(environ: dict, args: dict, expected: Any) -> None:
    found = rank_here(environ, RunArguments(**args))
    assert (found if found is None else tuple(vars(found).values())[:8]) == expected


@pytest.mark.parametrize(
    ("environ", "args", "named"),
    [
        (TORCHRUN, {"nproc": 2}, "--nproc"),
        (SLURM, {"world_size": 4}, "--world_size"),
        ({**TORCHRUN, "RANK": "4"}, {}, "RANK=4"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, {}, "WORLD_SIZE"),
        ({**TORCHRUN, "MASTER_PORT": "0"}, {}, "MASTER_PORT"),
        (PMI, {}, "MASTER_ADDR"),
    ],
)
def test_an_environment_that_makes_no_sense(environ: dict, args: dict, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        rank_here(environ, RunArguments(**args))


@pytest.mark.parametrize(
    ("gpu_id", "visible", "expected"),
    [
        ("0", "4, 6", "6"),  # the default: what the launcher leaves visible
        ("3,5", "4,6", "5"),
        ("3", "4,6", None),  # fewer than processes
        ("0", "7", "7"),  # a scheduler shows each process its own
        ("0", "", ""),
        ("", "4,6", ""),
    ],
)
def test_gpu_of_a_process(monkeypatch, gpu_id: str, visible: str, expected: str | None) -> None:
    """The second of two on its machine."""
    config = PosConfig("FPARec", "ml-100k", None, {"gpu_id": gpu_id})
    rank = rank_here({**TORCHRUN, "CUDA_VISIBLE_DEVICES": visible}, RunArguments())
    assert rank is not None and choose_gpu(config, rank) == ""  # none here
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if expected is None:
        with pytest.raises(UsageError, match="^gpu_id"):
            choose_gpu(config, rank)
    else:
        assert choose_gpu(config, rank) == expected


# --- who is missing ---


@pytest.mark.parametrize(
    ("offset", "output"),
    [
        (0, "of 2 processes, 1 did not come to 127.0.0.1:{}"),
        (1, "process 0 is missing: nothing answers at 127.0.0.1:{}"),
    ],
)
def test_a_launcher_that_does_not_come(
    tiny: Path, tmp_path: Path, capsys, offset: int, output: str
) -> None:
    port = free_port()
    more = ["--nproc=1", "--world_size=2", f"--group_offset={offset}", "--ip=127.0.0.1"]
    more += [f"--port={port}", "--join_timeout=0.2", f"--run_dir={tmp_path / 'x'}"]
    assert main(["run", *words(tiny, *more)]) == 2
    error = capsys.readouterr().err
    assert output.format(port) in error and "Traceback" not in error
    assert f"--group_offset {1 - offset}" in error and "--join_timeout" in error
    assert not (tmp_path / "x").exists()


def test_a_process_of_torchrun_that_does_not_come(
    tiny: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    given = {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4,
             "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")  # put back afterwards
    assert main(["run", *words(tiny, "--join_timeout=0.2", f"--run_dir={tmp_path / 'x'}")]) == 2
    assert "of 4 processes, 1, 2, 3 did not come" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_port_that_another_program_has(tiny: Path, tmp_path: Path, capsys) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        more = ["--nproc=2", f"--port={other.getsockname()[1]}", f"--run_dir={tmp_path / 'x'}"]
        assert main(["run", *words(tiny, *more)]) == 2
    assert "--port: no run can meet at localhost:" in capsys.readouterr().err


def test_what_was_told_first() -> None:
    port = free_port()
    kept = Rendezvous("localhost", port, True, 0.1)
    assert kept.error() is None and kept.folder is None
    for error in (CheckpointError("damaged"), ValueError("later")):
        with pytest.raises(type(error)), kept.joined(Rank(0, 1, 0, 1, "localhost", port), False):
            raise error
    found = kept.error()
    assert type(found) is CheckpointError and str(found) == "damaged"
    kept.begin("another run")
    assert kept.error() is None
    other = Rendezvous("localhost", port, False, 1)
    del kept
    with pytest.raises(TrainingError, match=f"localhost:{port} is gone"):
        other.error()


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
def test_two_processes_take_the_steps_of_one(
    tiny: Path, tmp_path: Path, model: str, options: dict
) -> None:
    """Up to rounding, without dropout; the last epoch is trained by one process again."""
    given = {"MAX_ITEM_LIST_LENGTH": 12, "learning_rate": 0.01, "data_path": str(tiny)}
    if model == "FPARec":
        given |= {**OPTIONS, "hidden_dropout_prob": 0.0}
    given |= options
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, nproc, epochs in ((one, 1, 3), (two, 2, 2)):
        more = {"run_dir": folder, "nproc": nproc, "verbose": False}
        recbole_pos.run(model, "tiny", None, {**given, "epochs": epochs}, **more)
    recbole_pos.run(resume=two, config_dict={"epochs": 3}, verbose=False)
    (weights, epochs, test), (others, other_epochs, other_test) = outcome(one), outcome(two)
    for name, tensor in weights.items():
        torch.testing.assert_close(others[name], tensor, rtol=1e-2, atol=2e-4)
    for (_, loss, valid), (_, other_loss, other_valid) in zip(epochs, other_epochs, strict=True):
        assert other_loss == pytest.approx(loss, rel=1e-4)
        assert other_valid == pytest.approx(valid, abs=0.02)
    assert other_test == pytest.approx(test, abs=0.02)


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
    assert shard.of(np.array([5, 9])).tolist() == [5] and shard.weight == 0
    assert shard.of(np.arange(7), np.full(7, 3)).tolist() == [2, 5] and shard.weight == 6 / 21
    assert Shard().of([1, 2, 3]) == [1, 2, 3]


@pytest.mark.long
def test_an_error_of_a_process_is_one_message(tiny: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "x"
    command = ["run", "-d", "tiny", f"--data_path={tiny}", "--nproc=2", f"--run_dir={folder}"]
    assert main([*command, "-m", "Pop"]) == 2
    error = capsys.readouterr().err
    assert "Pop has no gradients" in error and "Traceback" not in error and not folder.exists()
    nan = ["-m", "FPARec", "--learner=sgd", "--learning_rate=1e12", "--train_batch_size=8"]
    assert main([*command, *nan, "--hidden_size=16", "--inner_size=16"]) == 1
    error = capsys.readouterr().err
    assert "loss is" in error and "learning_rate" in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("AttrFormer", {"cross_sequence": "time_respecting"}),
        ("PosSASRec", {"loss_type": "SCE", "target_window": 2}),
    ],
)
def test_models_that_processes_cannot_share(
    experiment, monkeypatch, model: str, options: dict
) -> None:
    monkeypatch.setattr("recbole_pos.distributed.current_shard", lambda: Shard(0, 2))
    with pytest.raises(UsageError, match="^nproc: "):
        experiment(model, **options)


def test_fewer_targets_than_processes(tiny: Path, monkeypatch) -> None:
    """A process without a row would leave the others waiting for its part of the metrics."""
    monkeypatch.setattr("recbole_pos.data.loaders.current_shard", lambda: Shard(0, 10**6))
    with pytest.raises(UsageError, match="nproc: 1000000 processes share the valid targets"):
        prepare(PosConfig("FPARec", "tiny", None, {"data_path": str(tiny)}))


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"nproc": 0}, "nproc"),
        ({"nproc": 4, "world_size": 2}, "world_size"),
        ({"nproc": 2, "port": ""}, "port"),
        ({"nproc": 2, "world_size": 4, "group_offset": 3}, "group_offset"),
        ({"max_restarts": -1}, "max_restarts"),
        ({"join_timeout": float("nan")}, "join_timeout"),
    ],
)
def test_arguments_that_do_not_fit(tiny: Path, given: dict, option: str) -> None:
    with pytest.raises(UsageError, match=f"^--{option}: "):
        recbole_pos.run("FPARec", "tiny", config_dict={"data_path": str(tiny)}, **given)
