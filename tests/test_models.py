"""Whole models: FPARec against equations 5 to 10, times of the data, learning and resuming."""

from __future__ import annotations

import math
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import reference
import torch
from conftest import make_log, write_atomic
from shop import shop_options, tables, write
from torch import Tensor

import recbole_pos
from recbole_pos.experiment.trainer import PosTrainer
from recbole_pos.layers import triangular
from recbole_pos.position import positional_attention
from recbole_pos.position.positional_attention import MIN_BLOCKS


def forward(model, items: Tensor, n: int) -> Tensor:
    """[t, items] scores of one history; no dropout."""
    vectors, d = model.item_embedding.weight, model.item_embedding.weight.size(1)
    f = vectors[items] * math.sqrt(d) + model.position_embedding.weight[n - len(items) :]
    head, mask = reference.Head(n, 1, 0, [], [], []), {"positional_mask": "before_softmax"}
    for layer in model.trm_encoder.layer:
        attention, feed = layer.multi_head_attention, layer.feed_forward
        v = attention.LayerNorm(f) @ attention.value.weight.T  # equation 5
        f = f + reference.attention(attention.position.parts(), mask, v, v, v, head)  # 6, 7
        f = f + feed.dense_2(feed.dense_1(feed.LayerNorm(f)).relu())  # 8, with residuals
    return model.LayerNorm(f) @ vectors.T  # 9, 10


@pytest.mark.parametrize("name", ["FPARec", "PARec"])
@torch.no_grad()
def test_scores_equal_the_paper(experiment, double, name: str) -> None:
    made = experiment(name, MAX_ITEM_LIST_LENGTH=7)
    model = made.model.double().eval()
    for p in model.parameters():
        p.copy_(torch.randn_like(p) * 0.4)
    rows = made.loaders["train"]._dataset[np.arange(0, 120, 17)]
    got = model.full_sort_predict(rows)
    for row in range(len(rows)):
        items = rows["item_id_list"][row, : int(rows["item_length"][row])]
        torch.testing.assert_close(got[row], forward(model, items, 7)[-1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("n_heads", "size", "options"),
    [
        (1, 2, {}),
        (2, 3, {"positional_mask": "after_softmax"}),
        (2, 2, {"position": ["average"]}),
        (2, 5, {}),
    ],
    ids=str,
)
def test_products_without_the_zeros(experiment, monkeypatch, n_heads, size, options) -> None:
    """Loss and gradients of long histories, in blocks of rows, are those of full squares."""
    given = {"hidden_dropout_prob": 0.0, "attn_dropout_prob": 0.0, "n_heads": n_heads}
    made = experiment("FPARec", **given, **options)
    model, found = made.model.double(), []
    batch = max(made.trainer.training_loader(made.loaders["train"]), key=lambda b: b.width)
    product = Mock(wraps=triangular.triangular_product)
    monkeypatch.setattr(positional_attention, "triangular_product", product)
    for block in (10**6, size):
        monkeypatch.setitem(triangular.BLOCK, "cpu", block)
        loss = model.window_loss(batch)
        found.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
        used = block == size and batch.width >= MIN_BLOCKS * size
        heads = 1 if "position" in options else n_heads
        assert product.call_count == used * heads * len(model.trm_encoder.layer)
    for full, blocks in zip(*found, strict=True):
        torch.testing.assert_close(blocks, full, rtol=1e-9, atol=1e-12)


def test_the_time_of_the_target_is_never_read(experiment) -> None:
    """Another time of the held-out event leaves its scores alone; of the history it does not."""
    made = experiment("TORoPE")
    model = made.model.eval()
    batch = next(iter(made.loaders["test"]))[0].to(model.device)
    assert model.TIME_SEQ in batch.columns
    with torch.no_grad():
        before = model.full_sort_predict(batch)
        batch[made.dataset.time_field] = batch[made.dataset.time_field] + 1e6
        assert torch.equal(model.full_sort_predict(batch), before)
        batch[model.TIME_SEQ] = batch[model.TIME_SEQ] ** 1.01
        assert not torch.equal(model.full_sort_predict(batch), before)


def test_units_of_the_time_field(experiment, tmp_path) -> None:
    """The same log in milliseconds gives the same model output."""
    outs = []
    for unit, factor in (("seconds", 1), ("milliseconds", 1000)):
        frame = make_log()
        frame["timestamp"] = np.round(frame["timestamp"]) * factor
        folder = str(write_atomic(frame, tmp_path / unit, "clock"))
        made = experiment("TORoPE", "clock", data_path=folder, timestamp_unit=unit)
        batch = next(iter(made.loaders["test"]))[0].to(made.model.device)
        with torch.no_grad():
            outs.append(made.model.eval().full_sort_predict(batch))
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("PosRec", {"lr_decay_step": 2}),
        ("PosSASRec", {"loss_type": "SCE", "bucket_size_y": 4}),
        ("AttrFormer", {}),
    ],
)
def test_an_interrupted_run_ends_with_the_same_bits(
    tiny: Path, tmp_path: Path, monkeypatch, model: str, options: dict
) -> None:
    """Directions of SCE, clocks of AttrFormer's batches and rates of the epoch included."""
    rates, step, stop_at = {}, PosTrainer._step, None

    def stopping(self, loss_func, batch, watch, number: int):
        epoch = self.progress.next_epoch
        rates[epoch] = round(self.optimizer.param_groups[0]["lr"], 9)
        if stop_at == (epoch, number):
            raise KeyboardInterrupt
        return step(self, loss_func, batch, watch, number)

    monkeypatch.setattr(PosTrainer, "_step", stopping)
    sizes = {"hidden_size": 16, "inner_size": 16, "train_batch_size": 16, "data_path": str(tiny)}
    given, dataset = {**sizes, **options, "epochs": 4}, "tiny"
    if model == "AttrFormer":  # on data whose relations reach other users
        given = shop_options(write(tmp_path, tables()), hidden_dropout_prob=0.2, epochs=4)
        dataset = "shop"
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    result = recbole_pos.run(model, dataset, None, given, whole, verbose=False)
    if model == "PosRec":
        assert rates == {0: 1e-3, 1: 1e-3, 2: 1e-4, 3: 1e-4}
    stop_at = (2, 1)
    with pytest.raises(KeyboardInterrupt):
        recbole_pos.run(model, dataset, None, given, broken, verbose=False)
    stop_at = None
    assert recbole_pos.run(resume=broken, verbose=False).test == result.test
    one, two = recbole_pos.load(whole), recbole_pos.load(broken)
    assert all(map(torch.equal, one.model.parameters(), two.model.parameters()))
    again = one.trainer.evaluate(one.loaders["test"], load_best_model=False)
    assert dict(again) == result.test
