"""No tensor is left on the CPU when a model is trained and asked on another device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import SMALL, small
from elsewhere import ELSEWHERE, Far, elsewhere, no_reads
from shop import RELATIONS, shop_options, tables, write

from recbole_pos import distributed
from recbole_pos.config.options import find_option
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.loaders import make_training_loader
from recbole_pos.distributed import Shard
from recbole_pos.errors import TrainingError
from recbole_pos.experiment.build import Experiment, prepare
from recbole_pos.experiment.loss_watch import LATE
from recbole_pos.experiment.trainer import PosTrainer
from recbole_pos.inspect.attention import (
    attention_maps,
    kernel_factors,
    measure_attention,
    positional_weights,
    sample_histories,
)
from recbole_pos.inspect.attention_report import learned_periods
from recbole_pos.inspect.encoding import learned_encodings, session_vectors
from recbole_pos.inspect.relation_use import measure_relations
from recbole_pos.model.models import BASELINES, MODELS
from recbole_pos.position.schemes import SCHEMES

# One of each way to encode, attend, make batches and lose; every model and scheme in make test-all.
FEW: list[tuple[str, dict[str, Any]]] = [
    ("FPARec", {}),
    ("TORoPE", {"train_windows": "sliding"}),
    ("KernelAttention", {"kernel_u": "full", "kernel_l": "identity"}),
    ("PosSASRec", {"position": ["time_rope"]}),
    ("PosSASRec", {"position": ["cape"]}),
    ("PosSASRec", {"block": "hstu"}),
    ("PosSASRec", {"loss_type": "SCE"}),
    ("FPARec", {"loss_type": "sampled_softmax", "negative_sampler": "popularity"}),
    ("FPARec", {"target_window": 3, "ema_decay": 0.9, "warmup_steps": 2}),
    ("PosRec", {"position": ["lpe2d"], "augmentation": "prefix"}),
    ("AttrFormer", {"cross_sequence": "time_respecting"}),
    ("SASRec", {"augmentation": "all_positions"}),
]
MANY: list[tuple[str, dict[str, Any]]] = [
    *((model, {}) for model in [*MODELS, *BASELINES]),
    *(("PosSASRec", {"position": [scheme]}) for scheme in SCHEMES if scheme != "difsr"),
    *(("PosRec", {"position": [scheme]}) for scheme in ("nope", "spe", "aspe")),
    *(
        ("TORoPE", {"fusion": fusion})
        for fusion in find_option("fusion").choices
        if fusion != "effective"
    ),
    *(("AttrFormer", {"inference_relations": kind}) for kind in ("training_bank", "own", "none")),
    ("AttrFormer", {"relations": ["time", "position"]}),
    ("KernelAttention", {"kernel_u": "identity", "kernel_l": "full"}),
    ("PosSASRec", {"train_windows": "sliding"}),
    *(("PosSASRec", {"loss_type": name}) for name in ("BCE", "gBCE", "in_batch")),
    ("TORoPE", {"train_windows": "chunk"}),
    *((name, {"augmentation": "prefix"}) for name in ("PosSASRec", "TORoPE")),
    ("AttrFormer", {"augmentation": "prefix", "chunking": False}),
    ("AttrFormer", {"prior_weight": 0.0, "future_weights": [1.0]}),
]
CASES = [*FEW, *(pytest.param(*case, marks=pytest.mark.long) for case in MANY if case not in FEW)]


def there(model: str, folder: Path, **options: Any) -> Experiment:
    """A model elsewhere, with its data here."""
    config = small(model, data_path=str(folder), **options)
    config["device"] = ELSEWHERE
    experiment = prepare(config)
    assert all(isinstance(p.data, Far) for p in experiment.model.parameters())
    return experiment


def waits(options: dict[str, Any]) -> bool:
    """Which products of scalable cross-entropy are large, which targets differ: values tell."""
    return options.get("loss_type") in ("SCE", "in_batch")


@pytest.mark.parametrize(("model", "options"), CASES, ids=str)
def test_trains_and_predicts(tiny: Path, monkeypatch, model: str, options: dict) -> None:
    """Nothing stays on the CPU; and within a step nothing is read from where the model is."""
    with elsewhere(monkeypatch):
        made = there(model, tiny, **options)
        trainer, loaders = made.trainer, made.loaders
        if not waits(options):
            monkeypatch.setattr(trainer, "_step", no_reads()(trainer._step))
        line = trainer._train_epoch(trainer.training_loader(loaders["train"]), 0)
        found = trainer.evaluate(loaders["valid"], load_best_model=False)
    assert line["loss"] >= 0 and 0 <= found["hit@10"] <= 1


@pytest.mark.parametrize("wrong", [0, 2, 5])
def test_a_loss_that_is_no_number_is_found_a_few_steps_later(
    tiny: Path, monkeypatch, wrong: int
) -> None:
    """It is named, and neither it nor the steps behind it have touched the weights with it."""
    with elsewhere(monkeypatch):
        made = there("FPARec", tiny, train_batch_size=4)
        trainer, model = made.trainer, made.model
        honest, calls = model.window_loss, []

        def loss(batch: Any) -> torch.Tensor:
            calls.append(batch)
            return honest(batch) * (torch.nan if len(calls) == wrong + 1 else 1.0)

        with pytest.raises(
            TrainingError, match=f"loss is nan in epoch 0, batch {wrong}"
        ) as printed:
            trainer._train_epoch(trainer.training_loader(made.loaders["train"]), 0, loss)
        assert "weights and data are finite" in str(printed.value)
        assert len(calls) <= wrong + 1 + LATE
        assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_read_within_a_step_is_found(monkeypatch) -> None:
    with elsewhere(monkeypatch):
        x = torch.ones(3).to(ELSEWHERE)
        reads = (
            *(lambda: x.sum().item(), lambda: bool(x.any()), lambda: x[x > 0], lambda: x.cpu()),
            *(lambda: x.nonzero(), lambda: x.unique(), lambda: torch.equal(x, x)),
            *(lambda: x.masked_select(x > 0), lambda: x.repeat_interleave(x.long())),
            *(lambda: torch.zeros(3).copy_(x), lambda: torch.ones(3).to(ELSEWHERE)),
            lambda: x[torch.tensor([2])],
        )
        for read in reads:
            read()
            with no_reads(), pytest.raises(AssertionError, match="waited for"):
                read()
        with no_reads():
            x.sum().to("cpu", non_blocking=True)
            x[torch.arange(2, device=x.device)] + torch.zeros_like(x)[:2]


@pytest.mark.parametrize("options", [{}, {"train_windows": "sliding"}], ids=str)
def test_batches_are_made_where_the_log_is(tiny: Path, monkeypatch, options: dict) -> None:
    """Nothing goes there after the first batch, and batches are those of the CPU."""
    model = "TORoPE"  # reads times
    with elsewhere(monkeypatch):
        made = there(model, tiny, **options)
        loader = made.trainer.training_loader(made.loaders["train"])
        near = list(loader)
        far = iter(loader.batches_on(ELSEWHERE, "auto"))
        got = [next(far)]
        with no_reads():
            got += far
        for one, other in zip(near, got, strict=True):
            for name, want in vars(one).items():
                found = getattr(other, name)
                assert isinstance(found, Far) == isinstance(want, torch.Tensor)
                assert torch.equal(found.cpu(), want) if isinstance(found, Far) else found == want
        assert any(batch.positions is not None for batch in near) == bool(options)
        copied = list(loader_of(made).batches_on(ELSEWHERE, "never"))
        assert [len(batch) for batch in copied] == [len(batch) for batch in near]
        assert torch.equal(copied[-1].items.cpu(), near[-1].items)


def loader_of(made: Experiment) -> Any:
    """A fresh one, whose log is on the host."""
    return make_training_loader(
        made.config, made.loaders["train"]._dataset, made.trainer.adapter.requirements()
    )


def test_what_inspect_reads(tiny: Path, monkeypatch) -> None:
    """Attention, kernels, periods and encodings of a model elsewhere come back as numpy arrays."""
    with elsewhere(monkeypatch):
        for options in ({}, {"position": ["cape"]}, {"position": ["hstu"]}, {"block": "hstu"}):
            made = there("PosSASRec", tiny, **options)
            sample = sample_histories(made.model, made.loaders["test"], 20, 3, seed=0)
            assert all(np.isfinite(m).all() for m in measure_attention(made.model, sample).layers)
        made = there("KernelAttention", tiny)
        assert kernel_factors(made.model) and attention_maps(made.model, made.loaders["test"])
        assert positional_weights(there("FPARec", tiny).model)
        assert learned_periods(there("TORoPE", tiny, learn_frequencies="free").model)
        encodings = learned_encodings(there("PosRec", tiny).model, ["ldpe"])
        assert session_vectors(encodings["ldpe"], 5).shape == (5, SMALL["hidden_size"])


def test_relations_of_every_kind(tmp_path: Path, monkeypatch) -> None:
    """Attributes of items, events and users: trained, evaluated and inspected elsewhere."""
    config = PosConfig("AttrFormer", "shop", None, shop_options(write(tmp_path, tables())))
    config["device"] = ELSEWHERE
    with elsewhere(monkeypatch):
        made = prepare(config)
        loader = made.trainer.training_loader(made.loaders["train"])
        assert made.trainer._train_epoch(loader, 0)["loss"] > 0
        assert made.trainer.evaluate(made.loaders["valid"], load_best_model=False)
        uses, _ = measure_relations(
            made.model.eval(), [made.model.window_rows(b.to(ELSEWHERE))[0] for b in loader]
        )
        assert len(uses) == len(RELATIONS) - 1 and uses[-1].source == "user"


def test_a_tensor_left_behind_is_found(monkeypatch) -> None:
    with elsewhere(monkeypatch):
        x = torch.ones(3).to(ELSEWHERE)
        assert (x + torch.tensor(1.0))[torch.tensor([2])].item() == 2  # scalars and indices may
        assert torch.arange(3, device=x.device).device == x.device
        for wrong in (lambda: x + torch.ones(3), lambda: torch.cat([x, torch.ones(1)])):
            with pytest.raises(RuntimeError, match="a tensor of the CPU"):
                wrong()
        with pytest.raises((RuntimeError, TypeError, NotImplementedError)):
            x.numpy()


# --- one of several processes ---


@pytest.fixture
def group() -> Iterator[None]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Summed:
    """Stands where torch's own parallel module is, which knows no device elsewhere."""

    def __init__(self, model: Any, loss: Any) -> None:
        self.loss = loss

    def __call__(self, batch: Any) -> Any:
        return self.loss(batch)

    def same_buffers(self) -> None:
        """Nothing: there is one process."""


@pytest.mark.parametrize("options", [{}, {"train_windows": "sliding"}], ids=str)
def test_no_step_of_a_group_reads(tiny: Path, monkeypatch, group, options: dict) -> None:
    """The loss that is reported is the mean over all processes; it stays there until later."""
    monkeypatch.setattr(distributed, "SharedLoss", Summed)
    with elsewhere(monkeypatch):
        made = there("FPARec", tiny, **options)
        monkeypatch.setattr(distributed, "current_shard", lambda: Shard(0, 2))
        trainer = PosTrainer(made.config, made.model)
        loader = trainer.training_loader(made.loaders["train"])
        step = no_reads()(trainer._step)
        values: list[torch.Tensor] = []
        monkeypatch.setattr(trainer, "_step", lambda *given: values.append(step(*given)))
        assert trainer._train_epoch(loader, 0)["loss"] > 0
        assert all(isinstance(v, Far) and v.dtype == torch.float64 for v in values)


def test_a_part_is_gathered_without_copies(tiny: Path, monkeypatch) -> None:
    """Which windows are this process's is sent to the device once an epoch."""
    with elsewhere(monkeypatch):
        made = there("FPARec", tiny)
        loader = made.trainer.training_loader(made.loaders["train"])
        whole = [len(batch) for batch in loader]
        parts = []
        for rank in range(2):
            loader.divide(Shard(rank, 2))
            batches = loader.batches_on(ELSEWHERE, "always")
            found = [next(batches)]
            with no_reads():
                found += batches
            parts.append([len(batch) for batch in found])
        assert [a + b for a, b in zip(*parts, strict=True)] == whole


def test_the_sum_leaves_what_it_sums(group) -> None:
    value = torch.tensor(3.0, dtype=torch.float64)
    assert distributed.total(value).add_(1) == 4 and value == 3
