"""What the host makes of a batch for a device is what a model makes of it on a CPU."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CROSS_ENTROPY
from torch import Tensor

from recbole_pos.data.batch import SequenceBatch
from recbole_pos.data.loaders import WindowLoader
from recbole_pos.model.training import adapter

EXACT = {"hidden_dropout_prob": 0.0, "attn_dropout_prob": 0.0}
GRAPHS = ("PosRec", "FGNN")


def found(model: Any, loss: Any, batch: Any) -> list[Tensor]:
    """Loss and gradients, by the same draws."""
    torch.manual_seed(3)
    value = loss(batch)
    return [value, *torch.autograd.grad(value, list(model.parameters()), allow_unused=True)]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        *((name, {"anchors": anchors}) for name in GRAPHS for anchors in (True, False)),
        ("AttrFormer", {}),
        ("AttrFormer", {"train_windows": "sliding", "chunking": False}),
        ("AttrFormer", CROSS_ENTROPY["AttrFormer"]),
    ],
    ids=str,
)
def test_windows(experiment, model: str, options: dict[str, Any]) -> None:
    """To the bit: the same operations, some of them earlier."""
    made = experiment(model, **options)
    one = made.model.train()
    batch = next(iter(made.trainer.training_loader(made.loaders["train"])))
    prepared = made.trainer.adapter.requirements().prepare
    values = found(one, lambda batch: one.window_loss(prepared(batch)), batch)
    for value, other in zip(values, found(one, one.window_loss, batch), strict=True):
        assert (value is other is None) or torch.equal(value, other)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        *((name, {"augmentation": "prefix"}) for name in ("FPARec", "TORoPE", *GRAPHS)),
        ("AttrFormer", {"augmentation": "prefix", "chunking": False}),
        ("EncodedSTAMP", {}),
        ("EncodedSASRec", EXACT),
    ],
    ids=str,
)
def test_rows(experiment, model: str, options: dict[str, Any]) -> None:
    made = experiment(model, MAX_ITEM_LIST_LENGTH=9, **options)
    one = made.model.train()
    whole = made.loaders["train"]._dataset
    rows = whole[np.flatnonzero(whole.inter_feat[one.ITEM_SEQ_LEN].numpy() < 7)[:20]]
    requirements = made.trainer.adapter.requirements()
    packed = requirements.pack(rows)
    width = packed.width if isinstance(packed, SequenceBatch) else packed[one.ITEM_SEQ].size(1)
    assert width <= 6 and rows[one.ITEM_SEQ].size(1) == 9
    loss = made.trainer.adapter.loss(packed=False)
    values = found(one, lambda rows: loss(requirements.pack(rows)), rows)
    for value, other in zip(values, found(one, loss, rows), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-7)


def test_a_class_of_ones_own_keeps_its_own_loss_of_rows(experiment) -> None:
    made = experiment("FPARec", augmentation="prefix")
    assert adapter(made.config, made.model).requirements().pack is not None
    made.model.__class__ = type(
        "Mine", (type(made.model),), {"compute_states": lambda self, rows: 0}
    )
    assert adapter(made.config, made.model).requirements().pack is None


def test_graphs_are_made_by_a_thread_one_batch_ahead(experiment) -> None:
    made = experiment("PosRec")
    loader = made.trainer.training_loader(made.loaders["train"])
    threads = set()

    def prepare(batch: SequenceBatch) -> SequenceBatch:
        threads.add(threading.get_ident())
        return made.model.prepare(batch)

    object.__setattr__(loader.requirements, "prepare", prepare)
    assert isinstance(loader, WindowLoader)
    here = [batch.prepared for batch in loader.batches_on(torch.device("cpu"), "auto")]
    assert set(here) == {None} and not threads  # a CPU has the model do it
    next(loader.batches_on(torch.device("meta"), "auto"))
    assert threads and threading.get_ident() not in threads
