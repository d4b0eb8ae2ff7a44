"""No tensor is left on the CPU when a model is trained and asked on another device.

The device exists nowhere: its tensors hide a CPU tensor each. Operations run on what is hidden,
after checking what a GPU would: that no tensor of the CPU takes part, but for scalars and indices.
It calls itself ``meta``, which torch lets anyone claim.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import small
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from recbole_pos.config.options import find_option
from recbole_pos.errors import TrainingError
from recbole_pos.experiment.build import Experiment, prepare
from recbole_pos.experiment.diagnosis import LATE
from recbole_pos.model.models import MODELS, is_untrained
from recbole_pos.position.schemes import SCHEMES

ELSEWHERE = torch.device("meta")

# Operations for whose result, or its shape, the host must wait.
READS = {
    *("_local_scalar_dense", "equal", "is_nonzero", "item", "nonzero", "nonzero_numpy", "argwhere"),
    *("masked_select", "bincount", "_unique2", "unique_dim", "unique_consecutive"),
}
_refused = False  # whether one is an error now


class Far(Tensor):
    """A tensor elsewhere."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> Far:
        layout = {"strides": near.stride(), "storage_offset": near.storage_offset()}
        layout |= {"dtype": near.dtype, "device": ELSEWHERE}
        far = Tensor._make_wrapper_subclass(cls, near.size(), **layout)
        far.near = near
        return far

    def __init__(self, near: Tensor) -> None:
        pass

    def new_tensor(self, data: Any, dtype: torch.dtype | None = None) -> Tensor:
        """As on any device but meta, where torch leaves the values out."""
        return torch.tensor(data, dtype=dtype or self.dtype).to(self.device)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


class _Everything(TorchDispatchMode):
    """Catches what makes tensors from none, such as arange."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


def _run(function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    name, leaves = function.overloadpacket.__name__, tree_leaves((args, kwargs))
    far = [x for x in leaves if isinstance(x, Far)]
    near = [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, Far) and x.dim()]
    indexes = name.startswith("index") and isinstance(args[0], Far)
    if far and near and name not in ("_to_copy", "copy_") and not indexes:
        raise RuntimeError(f"{function}: a tensor of the CPU among those elsewhere")
    copies = bool(near) and name == "_to_copy" and kwargs.get("device") == ELSEWHERE
    if _refused and (_reads(name, args, kwargs) if far else copies):
        raise AssertionError(f"{function}: a GPU is waited for")
    goes = bool(far) and not (name == "copy_" and args[0] is not far[0])
    if (device := kwargs.get("device")) is not None:
        goes, kwargs = device == ELSEWHERE, {**kwargs, "device": torch.device("cpu")}
    args, hidden = tree_map(_show, args), tree_map(_show, kwargs)
    with _disable_current_modes():
        found = function(*args, **hidden)
    if not goes:
        return found
    if function._schema.is_mutable:  # in place: the same object, not another around it
        return tree_map(lambda x: next((f for f in far if f.near is x), x), found)
    return tree_map(lambda x: Far(x) if isinstance(x, Tensor) else x, found)


def _reads(name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a GPU would be waited for."""
    if name in ("_to_copy", "copy_"):
        here = kwargs.get("device", ELSEWHERE) if name == "_to_copy" else args[0].device
        waits = not (kwargs.get("non_blocking") or (name == "copy_" and any(args[2:])))
        return waits and torch.device(here).type == "cpu"
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        masks = (torch.bool, torch.uint8)
        return any(x.dtype in masks or type(x) is Tensor for x in args[1] if x is not None)
    return name in READS


@contextlib.contextmanager
def no_reads() -> Iterator[None]:
    """Within, what waits for the device, or copies to it, is an error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "_refused", True)
        yield


def _show(x: Any) -> Any:
    return x.near if isinstance(x, Far) else x


@contextlib.contextmanager
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within, tensors can be moved to ``ELSEWHERE``; without what no meta tensor may do."""
    adam = sys.modules["torch.optim.adam"]  # torch.optim hides it
    monkeypatch.setattr(adam, "_device_dtype_check_for_fused", lambda *_: None)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)
    with _Everything(), sdpa_kernel(SDPBackend.MATH):
        yield


# One of each way to encode, attend, make batches and lose; every model and scheme in make test-all.
FEW: list[tuple[str, dict[str, Any]]] = [
    ("FPARec", {"target_window": 3, "warmup_steps": 2}),
    ("TORoPE", {"train_windows": "sliding"}),
    ("KernelAttention", {"kernel_u": "full", "kernel_l": "identity"}),
    ("PosSASRec", {"position": ["cape"], "loss_type": "SCE"}),
    ("PosSASRec", {"block": "hstu"}),
    ("FPARec", {"loss_type": "sampled_softmax", "negative_sampler": "popularity"}),
    ("PosRec", {"position": ["lpe2d"], "augmentation": "prefix"}),
    ("AttrFormer", {"cross_sequence": "time_respecting"}),
    ("SASRec", {"augmentation": "all_positions"}),
]
MANY: list[tuple[str, dict[str, Any]]] = [
    *((model, {}) for model in MODELS),
    *(("PosSASRec", {"position": [x]}) for x in SCHEMES if x not in ("difsr", "request_age")),
    ("PosSASRec", {"position": ["request_age"], "train_windows": "prefix"}),
    *(("TORoPE", {"fusion": x}) for x in find_option("fusion").choices if x != "effective"),
    *(("AttrFormer", {"inference_relations": kind}) for kind in ("training_bank", "own", "none")),
    *(("PosSASRec", {"loss_type": name}) for name in ("BCE", "gBCE", "in_batch")),
    ("AttrFormer", {"augmentation": "prefix", "chunking": False}),
]
CASES = [*FEW, *(pytest.param(*case, marks=pytest.mark.long) for case in MANY)]


def there(model: str, folder: Path, **options: Any) -> Experiment:
    config = small(model, data_path=str(folder), **options)
    config["device"] = ELSEWHERE
    experiment = prepare(config)
    assert all(isinstance(p.data, Far) for p in experiment.model.parameters())
    return experiment


@pytest.mark.parametrize(("model", "options"), CASES, ids=str)
def test_trains_and_predicts(tiny: Path, monkeypatch, model: str, options: dict) -> None:
    """Nothing stays on the CPU; and within a step nothing is read from where the model is."""
    with elsewhere(monkeypatch):
        size = {} if is_untrained(model) else {"train_batch_size": 128}
        made = there(model, tiny, **size, **options)
        trainer, loaders = made.trainer, made.loaders
        # These losses, and graphs of RecBole's padded sessions, look at values.
        looks = options.get("loss_type") in ("SCE", "in_batch") or model.startswith("Anchored")
        if not looks:
            monkeypatch.setattr(trainer, "_step", no_reads()(trainer._step))
        line = trainer._train_epoch(trainer.training_loader(loaders["train"]), 0)
        found = trainer.evaluate(loaders["valid"], load_best_model=False)
    assert line["loss"] >= 0 and 0 <= found["hit@10"] <= 1


@pytest.mark.parametrize("wrong", [0, 5])
def test_a_loss_that_is_no_number_is_found_a_few_steps_later(tiny, monkeypatch, wrong: int) -> None:
    """It is named, and neither it nor the steps behind it have touched the weights with it."""
    with elsewhere(monkeypatch):
        made = there("FPARec", tiny, train_batch_size=4)
        trainer, model, calls = made.trainer, made.model, []

        def loss(batch: Any) -> torch.Tensor:
            calls.append(batch)
            return model.window_loss(batch) * (torch.nan if len(calls) == wrong + 1 else 1.0)

        trainer.adapter.choose_loss = lambda packed: loss
        with pytest.raises(TrainingError, match=f"loss is nan in epoch 0, batch {wrong}"):
            trainer._train_epoch(trainer.training_loader(made.loaders["train"]), 0)
        assert len(calls) <= wrong + 1 + LATE
        assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_the_device_finds_reads_and_tensors_left_behind(monkeypatch) -> None:
    with elsewhere(monkeypatch):
        x = torch.ones(3).to(ELSEWHERE)
        for read in (lambda: x.sum().item(), lambda: x[x > 0], lambda: torch.ones(3).to(ELSEWHERE)):
            read()
            with no_reads(), pytest.raises(AssertionError, match="waited for"):
                read()
        assert (x + torch.tensor(1.0))[torch.tensor([2])].item() == 2  # scalars and indices may
        with pytest.raises(RuntimeError, match="a tensor of the CPU"):
            torch.cat([x, torch.ones(1)])


@pytest.mark.parametrize("options", [{}, {"train_windows": "sliding"}], ids=str)
def test_batches_are_made_where_the_log_is(tiny: Path, monkeypatch, options: dict) -> None:
    """Nothing goes there after the first batch, and batches are those of the CPU."""
    model = "TORoPE"  # reads times
    with elsewhere(monkeypatch):
        made = there(model, tiny, **options)
        loader = made.trainer.training_loader(made.loaders["train"])
        near = list(loader)
        far = iter(loader.iterate_batches(ELSEWHERE))
        got = [next(far)]
        with no_reads():
            got += far
        for one, other in zip(near, got, strict=True):
            for name, want in vars(one).items():
                found = getattr(other, name)
                assert isinstance(found, Far) == isinstance(want, torch.Tensor)
                assert torch.equal(found.cpu(), want) if isinstance(found, Far) else found == want
        assert any(batch.queries is not None for batch in near) == bool(options)
