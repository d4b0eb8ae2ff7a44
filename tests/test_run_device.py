"""Where a run computes: what was asked for, or an error; and that it says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import SMALL

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config.options import find_option
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.experiment.device import Precision, check_device, describe_device, device_line


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # which RecBole's Config writes
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def config(tiny: Path, **options) -> PosConfig:
    return PosConfig("FPARec", "tiny", None, {**SMALL, "data_path": str(tiny), **options})


@pytest.mark.parametrize("wanted", [7, "0, 1"])
def test_a_gpu_that_is_not_there(tiny: Path, tmp_path: Path, no_gpu, wanted) -> None:
    options = {**SMALL, "data_path": str(tiny), "gpu_id": wanted}
    with pytest.raises(UsageError, match=r"gpu_id: .* is not there.*--use_gpu=False"):
        recbole_pos.run("FPARec", "tiny", None, options, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    for fine in ({"use_gpu": False, "gpu_id": wanted}, {"gpu_id": ""}, {"gpu_id": "0"}, {}):
        check_device(config(tiny, **fine))


def test_use_gpu_false_is_the_cpu_where_there_is_a_gpu(tiny: Path, no_gpu, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert config(tiny, use_gpu=False)["device"].type == "cpu"
    there = config(tiny, gpu_id="7")
    check_device(there)
    assert there["device"].type == "cuda"


@pytest.mark.parametrize("wanted", ["cuda:0", "-1"])
def test_what_is_no_number_of_a_gpu(tiny: Path, no_gpu, wanted: str) -> None:
    with pytest.raises(UsageError, match="^gpu_id: "):
        check_device(config(tiny, gpu_id=wanted))


def test_a_run_of_another_machine_can_be_used_here(tiny: Path, tmp_path: Path, no_gpu) -> None:
    run = tmp_path / "run"
    recbole_pos.run("FPARec", "tiny", None, {**SMALL, "data_path": str(tiny)}, run_dir=run)
    text = (run / "config.yaml").read_text()
    for here, there in (("gpu_id: '0'", "gpu_id: '7'"), ("worker: 0", "worker: 640")):
        assert here in text
        text = text.replace(here, there)
    (run / "config.yaml").write_text(text)
    assert recbole_pos.load(run).config["worker"] == find_option("worker").high
    recbole_pos.run(resume=run, verbose=False)


def test_the_headline_and_the_result_name_it(tiny: Path, tmp_path: Path, capsys, no_gpu) -> None:
    options = [f"--{key}={value}" for key, value in SMALL.items()]
    run = ["run", "-m", "FPARec", "-d", "tiny", f"--data_path={tiny}", *options]
    assert main([*run, f"--run_dir={tmp_path / 'run'}"]) == 0
    threads = torch.get_num_threads()
    printed = json.loads((tmp_path / "run" / "result.json").read_text())["device"]
    processor = printed.pop("processor")
    assert processor.endswith(torch.backends.cpu.get_cpu_capability())
    assert printed == {"name": "cpu", "threads": threads, "precision": "float32"}
    assert device_line(printed) in capsys.readouterr().out.splitlines()[1]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, "tf32"),
        ({"enable_amp": True}, "bf16"),
        *(({"precision": name}, name) for name in ("fp32", "tf32", "bf16", "fp16")),
    ],
    ids=str,
)
def test_precision_of_a_gpu(tiny: Path, no_gpu, monkeypatch, options, found) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made = Precision.from_config(config(tiny, **options))
    assert (made.name, made.device) == (found, "cuda")
    before = torch.get_float32_matmul_precision()
    with made.steps():
        inside = torch.get_float32_matmul_precision()
    assert inside == ("highest" if found == "fp32" else "high")
    assert torch.get_float32_matmul_precision() == before == "highest"


def test_half_precision_leaves_cudnn_attention_out() -> None:
    """It plans for milliseconds for every new shape, and batches have new shapes."""
    allowed = torch.backends.cuda.cudnn_sdp_enabled
    assert allowed()
    with Precision("bf16", "cpu").forward():
        assert not allowed()
    with Precision("fp32", "cpu").forward():
        assert allowed()


def test_precision_of_a_cpu(tiny: Path, no_gpu) -> None:
    for options, found in (({}, "fp32"), ({"precision": "tf32"}, "fp32")):
        assert Precision.from_config(config(tiny, **options)).name == found
    half = config(tiny, enable_amp=True)
    assert describe_device(half)["precision"] == "float32 with bfloat16 products"
    for options, option in (
        ({"precision": "fp16"}, "precision"),
        ({"enable_amp": True, "precision": "fp32"}, "enable_amp"),
        ({"enable_amp": True, "enable_scaler": True}, "enable_scaler"),
    ):
        with pytest.raises(UsageError, match=f"^{option}: "):
            check_device(config(tiny, **options))


def test_a_run_in_float16_does_not_go_on_on_a_cpu(tiny: Path, tmp_path: Path, no_gpu) -> None:
    """It is another run there; what it has learned can be used."""
    options = {**SMALL, "data_path": str(tiny), "epochs": 1}
    recbole_pos.run("PosSASRec", "tiny", None, options, run_dir=tmp_path / "run", verbose=False)
    file = tmp_path / "run" / "config.yaml"
    file.write_text(file.read_text().replace("precision: auto", "precision: fp16"))
    with pytest.raises(UsageError, match="fp16, which needs a GPU"):
        recbole_pos.run(resume=tmp_path / "run", config_dict={"epochs": 2}, verbose=False)
    assert recbole_pos.load(tmp_path / "run").config["precision"] == "fp16"


def test_a_run_in_bfloat16(experiment, no_gpu) -> None:
    """Products alone: weights, gradients and the optimiser keep float32, and the loss is near."""
    losses = {}
    for precision in ("fp32", "bf16"):
        made = experiment("PosSASRec", precision=precision)
        trainer = made.trainer
        losses[precision] = trainer._train_epoch(trainer.training_loader(made.loaders["train"]), 0)
        states = [v for state in trainer.optimizer.state.values() for v in state.values()]
        tensors = [*trainer.model.parameters(), *(p.grad for p in trainer.model.parameters())]
        assert {x.dtype for x in (*tensors, *states)} == {torch.float32}
    near, far = losses["fp32"]["loss"], losses["bf16"]["loss"]
    assert near != far == pytest.approx(near, rel=0.01)
