"""Where a run computes: what was asked for, or an error; and that it says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import SMALL

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config.options import rule
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.experiment.device import describe_device, device_line, require_device


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # which RecBole's Config writes
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def config(tiny: Path, **options) -> PosConfig:
    return PosConfig("FPARec", "tiny", None, {**SMALL, "data_path": str(tiny), **options})


@pytest.mark.parametrize("wanted", ["7", 7, "1,2", "0, 1"])
def test_a_gpu_that_is_not_there(tiny: Path, tmp_path: Path, no_gpu, wanted) -> None:
    options = {**SMALL, "data_path": str(tiny), "gpu_id": wanted}
    with pytest.raises(UsageError, match=r"gpu_id: .* is not there.*--use_gpu=False"):
        recbole_pos.run("FPARec", "tiny", None, options, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    for fine in ({"use_gpu": False, "gpu_id": wanted}, {"gpu_id": ""}, {"gpu_id": "0"}, {}):
        require_device(config(tiny, **fine))


def test_a_gpu_that_is_there(tiny: Path, no_gpu, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given = config(tiny, gpu_id="7")
    require_device(given)
    assert given["device"].type == "cuda"


def test_use_gpu_false_is_the_cpu_where_there_is_a_gpu(tiny: Path, no_gpu, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert config(tiny, use_gpu=False)["device"].type == "cpu"
    assert config(tiny)["device"].type == "cuda"


@pytest.mark.parametrize("wanted", ["cuda:0", "0;1", "-1", "all"])
def test_what_is_no_number_of_a_gpu(tiny: Path, no_gpu, wanted: str) -> None:
    with pytest.raises(UsageError, match="gpu_id: expected numbers of GPUs"):
        require_device(config(tiny, gpu_id=wanted))


def test_a_run_of_another_machine_can_be_used_here(tiny: Path, tmp_path: Path, no_gpu) -> None:
    run = tmp_path / "run"
    recbole_pos.run("FPARec", "tiny", None, {**SMALL, "data_path": str(tiny)}, run_dir=run)
    text = (run / "config.yaml").read_text()
    for here, there in (("gpu_id: '0'", "gpu_id: '7'"), ("worker: 0", "worker: 640")):
        assert here in text
        text = text.replace(here, there)
    (run / "config.yaml").write_text(text)
    assert recbole_pos.load(run).config["worker"] == rule("worker").high
    recbole_pos.run(resume=run, verbose=False)


def test_the_headline_and_the_result_name_it(tiny: Path, tmp_path: Path, capsys, no_gpu) -> None:
    options = [f"--{key}={value}" for key, value in SMALL.items()]
    run = ["run", "-m", "FPARec", "-d", "tiny", f"--data_path={tiny}", *options]
    assert main([*run, f"--run_dir={tmp_path / 'run'}"]) == 0
    threads = torch.get_num_threads()
    told = json.loads((tmp_path / "run" / "result.json").read_text())["device"]
    assert told == {"name": "cpu", "threads": threads, "precision": "float32"}
    assert device_line(told) in capsys.readouterr().out.splitlines()[0]


def test_precision(tiny: Path, no_gpu) -> None:
    told = describe_device(config(tiny, enable_amp=True))
    assert told["precision"] == "bfloat16 where autocast allows"
    told = {"name": "cpu", "threads": 1, "precision": "float32"}
    assert device_line(told) == "cpu with 1 thread in float32"
