"""On what a run computes: the device, its precision, its memory; or an error."""

from pathlib import Path

import pytest
import torch
from conftest import SMALL, train

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.experiment import device
from recbole_pos.experiment.device import Precision, check_device, describe_device
from recbole_pos.layers import large_products


@pytest.fixture
def no_gpu(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # which RecBole's Config writes
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def config(tiny: Path, **options) -> PosConfig:
    return PosConfig("FPARec", "tiny", None, {**SMALL, "data_path": str(tiny), **options})


def test_a_gpu_that_is_not_there_is_refused(tiny, tmp_path, no_gpu, monkeypatch) -> None:
    options = {**SMALL, "data_path": str(tiny), "gpu_id": "0, 1"}
    with pytest.raises(UsageError, match=r"gpu_id: .* is not there.*--use_gpu=False"):
        recbole_pos.run("FPARec", "tiny", None, options, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    for fine in ({"use_gpu": False, "gpu_id": 7}, {}):
        check_device(config(tiny, **fine))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert config(tiny, use_gpu=False)["device"].type == "cpu"
    there = config(tiny, gpu_id="7")
    check_device(there)
    assert there["device"].type == "cuda"


def test_a_run_of_another_machine_resumes_here(tiny, tmp_path, no_gpu) -> None:
    """It resumes without the GPU that it had."""
    run = train(tiny, tmp_path / "run")
    text = (run / "config.yaml").read_text()
    assert "gpu_id: '0'" in text
    (run / "config.yaml").write_text(text.replace("gpu_id: '0'", "gpu_id: '7'"))
    assert recbole_pos.run(resume=run, verbose=False).test


def test_a_cpu_computes_in_float32_or_bfloat16(tiny, no_gpu) -> None:
    for options in ({}, {"precision": "tf32"}):
        found = describe_device(config(tiny, **options))
        assert found.pop("processor").endswith(torch.backends.cpu.get_cpu_capability())
        threads = torch.get_num_threads()
        assert found == {"name": "cpu", "threads": threads, "precision": "float32"}
    half = describe_device(config(tiny, enable_amp=True))
    assert half["precision"] == "float32 with bfloat16 products"


@pytest.mark.parametrize(
    ("options", "found"),
    [({}, "tf32"), ({"enable_amp": True}, "bf16"), ({"precision": "fp32"}, "fp32")],
    ids=str,
)
def test_a_gpu_rounds_products_unless_it_is_fp32(tiny, no_gpu, monkeypatch, options, found) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made = Precision.from_config(config(tiny, **options))
    assert (made.name, made.device) == (found, "cuda")
    before = torch.get_float32_matmul_precision()
    with made.rounded_products():
        inside = torch.get_float32_matmul_precision()
    assert inside == ("highest" if found == "fp32" else "high")
    assert torch.get_float32_matmul_precision() == before == "highest"


def test_half_precision_leaves_cudnn_attention_out() -> None:
    """It plans for milliseconds for every new shape, and batches have new shapes."""
    for name in ("bf16", "fp32"):
        with Precision(name, "cpu").autocast():
            assert torch.backends.cuda.cudnn_sdp_enabled() == (name == "fp32")


def test_bfloat16_rounds_products_only(experiment, no_gpu) -> None:
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


# --- what does not fit into memory is refused; what is freed goes back to the system ---


@pytest.mark.parametrize(("model", "part"), [("Pop", None), ("FPARec", 10)])
def test_scores_of_a_batch_must_fit(experiment, monkeypatch, model, part) -> None:
    """Of all items; of a part of them where a model is evaluated part by part."""
    monkeypatch.setattr(large_products, "PART", 10)
    assert experiment(model, eval_batch_size=50).trainer.part_size == part
    monkeypatch.setattr(device, "get_memory_limit", lambda: 1000)
    with pytest.raises(UsageError, match=f"eval_batch_size: .* for {part or 41} items"):
        experiment(model, eval_batch_size=50)
