"""Batches of few shapes: the same loss, nothing learned of what fills them, few shapes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.batch import SequenceBatch
from recbole_pos.data.loaders import training_loader
from recbole_pos.data.shapes import Grid, Shape, filled, rounded
from recbole_pos.distributed import Shard
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import prepare

EXACT = {"hidden_dropout_prob": 0.0, "attn_dropout_prob": 0.0}


@given(st.integers(1, 10**6), st.sampled_from([1, 4, 8]))
def test_sizes_are_rounded_up_to_steps(n: int, steps: int) -> None:
    found = rounded(n, steps)
    assert n <= found <= max(n + n / steps, n)
    assert rounded(found, steps) == found
    octave = {rounded(m, 8) for m in range(1025, 2049)}
    assert octave == set(range(1152, 2049, 128))


def batch_of(lengths: list[int], sliding: bool) -> SequenceBatch:
    m = sum(lengths)
    last = torch.tensor(lengths).cumsum(0) - 1
    return SequenceBatch(
        items=torch.arange(1, m + 1),
        lengths=torch.tensor(lengths),
        targets=torch.ones(len(lengths) if sliding else m, dtype=torch.int64),
        width=max(lengths),
        positions=last if sliding else None,
        times=torch.arange(m, dtype=torch.float64),
    )


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=60),
    st.booleans(),
    st.integers(1, 1500),
)
@example([1] * 9, False, 50)  # each event that fills is a sequence
def test_sequences_that_fill_are_sequences(lengths: list[int], sliding: bool, mean: int) -> None:
    """Of one event to as many as a window may have; what was there stands where it stood."""
    batch, grid = batch_of(lengths, sliding), Grid(40, mean, mean)
    found, shape = filled(batch, grid), Shape.of(batch, grid)
    assert len(found.items) == int(found.lengths.sum()) == shape.events == len(found.times)
    assert (len(found.lengths), len(found.targets)) == (shape.sequences, shape.targets)
    assert max(lengths) <= found.width == shape.width <= grid.longest
    more = found.lengths[len(lengths) :]
    assert len(more) > 0 and more.min() >= 1 and more.max() <= found.width
    assert len(found) == len(batch) == found.real.sum() and found.real[: len(batch)].all()
    for name in ("items", "lengths", "targets", "times"):
        before = getattr(batch, name)
        assert torch.equal(getattr(found, name)[: len(before)], before)
    assert not found.items[len(batch.items) :].any()
    if sliding:
        assert len(found.positions) == shape.targets
        assert (found.positions[len(lengths) :] == shape.events - 1).all()


MODELS: list[tuple[str, dict[str, Any]]] = [
    ("PosSASRec", {"position": ["rope", "time_decay"], "block": "hstu"}),
    ("PosSASRec", {"position": ["learned"], "block": "ligr"}),
    ("PosSASRec", {"train_windows": "sliding", "norm": "post", "position": ["t5"]}),
    *((name, {}) for name in ("FPARec", "KernelAttention", "TORoPE")),
]


def learned(model: Any, batch: SequenceBatch) -> list[Tensor]:
    loss = model.window_loss(batch)
    given = [p for p in model.parameters() if p.requires_grad]
    return [loss, *torch.autograd.grad(loss, given, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize(("model", "options"), MODELS, ids=str)
def test_loss_and_gradients_are_those_of_the_batch(experiment, double, model, options) -> None:
    """And to the bit the same who the items are that fill it: no one looks at them."""
    made = experiment(model, n_layers=2, **EXACT, **options)
    one = made.model.double().train()
    sizes = set()
    for batch in list(made.trainer.training_loader(made.loaders["train"]))[:4]:
        full = filled(batch, Grid(12, 100, 60))
        sizes.add(len(full.items) - len(batch.items))
        found = learned(one, full)
        for value, want in zip(found, learned(one, batch), strict=True):
            torch.testing.assert_close(value, want, rtol=1e-11, atol=1e-12)
        items = full.items.clone()
        items[len(batch.items) :] = torch.randint(1, one.n_items, (len(items) - len(batch.items),))
        for value, want in zip(learned(one, replace(full, items=items)), found, strict=True):
            assert torch.equal(value, want)
    assert min(sizes) >= 1


@pytest.mark.parametrize("options", [{}, {"train_windows": "sliding"}], ids=str)
def test_an_epoch_of_ml_100k_has_few_shapes(options: dict[str, Any]) -> None:
    """And those of later epochs are the same ones; what fills them is a twentieth of them."""
    given = {"show_progress": False, "batch_shapes": "fixed", "MAX_ITEM_LIST_LENGTH": 50, **options}
    made = prepare(PosConfig("PosSASRec", "ml-100k", None, given))
    loader = made.trainer.training_loader(made.loaders["train"])
    shapes: Counter[tuple[int, ...]] = Counter()
    real = events = 0
    for epoch in range(3):
        loader.set_epoch(epoch)
        for batch in loader:
            sizes = (batch.items, batch.lengths, batch.targets)
            shapes[(*(len(x) for x in sizes), batch.width)] += 1
            events += len(batch.items)
            real += int((batch.items > 0).sum())
    assert len(shapes) <= 10 and sum(shapes.values()) > 50
    assert real < events < 1.05 * real


def test_training_counts_real_targets(experiment) -> None:
    """An epoch in fixed shapes is one in exact shapes, but for the last digits."""
    losses = []
    for shapes in ("exact", "fixed"):
        made = experiment("FPARec", batch_shapes=shapes, **EXACT)
        loader = made.trainer.training_loader(made.loaders["train"])
        assert sum(len(batch) for batch in loader) == loader.targets
        losses.append([made.trainer._train_epoch(loader, epoch)["loss"] for epoch in range(2)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0] != losses[1]


def test_parts_of_processes_are_filled_to_their_own_mean(experiment) -> None:
    """Half of a batch is not filled up to a whole one."""
    made = experiment("FPARec", batch_shapes="fixed")
    loader = loader_of_parts(made, Shard())
    whole = max(len(batch.items) for batch in loader)
    parts = [list(loader_of_parts(made, Shard(rank, 2))) for rank in range(2)]
    assert all(len(batch.items) < 0.75 * whole for part in parts for batch in part)
    assert sum(len(batch) for part in parts for batch in part) == loader.targets


def loader_of_parts(made: Any, shard: Shard) -> Any:
    loader = training_loader(
        made.config, made.loaders["train"]._dataset, made.trainer.adapter.requirements()
    )
    loader.divide(shard)
    return loader


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("PosRec", {}),
        ("SASRec", {"augmentation": "all_positions"}),
        ("FPARec", {"loss_type": "SCE"}),
        ("AttrFormer", {}),
    ],
    ids=str,
)
def test_what_cannot_is_refused(experiment, model: str, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="batch_shapes: fixed is for what compile"):
        experiment(model, batch_shapes="fixed", **options)


def test_a_gpu_replays_what_is_compiled(experiment, monkeypatch) -> None:
    """Recorded once a shape; on a CPU, or in exact shapes, nothing is recorded."""
    asked, begun = [], []

    def compiler(function: Any, **given: Any) -> Any:
        asked.append(given)
        return function

    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(1))
    made = experiment("FPARec", compile=True)
    batch = next(iter(made.trainer.training_loader(made.loaders["train"])))
    for device, shapes in (("cpu", "auto"), ("cuda", "auto"), ("cuda", "fixed")):
        made.config["device"], made.config["batch_shapes"] = torch.device(device), shapes
        made.trainer.adapter.__dict__.pop("_window_loss", None)
        assert made.trainer.adapter.loss(packed=True)(batch) > 0
    plain = {"dynamic": True}
    assert asked == [plain, plain, {**plain, "mode": "reduce-overhead"}] and begun == [1]
