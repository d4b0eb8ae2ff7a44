"""Whole models: FPARec against equations 5 to 10, times of the data, learning and resuming."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from conftest import CROSS_ENTROPY, make_log, write_atomic
from shop import shop_options, tables, write
from steps import learn
from torch import Tensor

import recbole_pos
from recbole_pos.config.defaults import plugin_defaults
from recbole_pos.errors import UsageError
from recbole_pos.experiment.trainer import PosTrainer
from recbole_pos.layers import triangular
from recbole_pos.position import positional_attention
from recbole_pos.position.positional_attention import BLOCKS


def forward(model, items: Tensor, n: int) -> Tensor:
    """[t, items] scores of one history; no dropout."""
    vectors, d = model.item_embedding.weight, model.item_embedding.weight.size(1)
    f = vectors[items] * math.sqrt(d) + model.position_embedding.weight[n - len(items) :]
    times = [0.0] * len(items)
    sequence = reference.Sequence(n, 1, 0, times, times, items.tolist())
    for layer in model.trm_encoder.layer:
        attention, feed = layer.multi_head_attention, layer.feed_forward
        v = reference.layer_norm(f, attention.LayerNorm) @ attention.value.weight.T  # 5
        mask = {"positional_mask": "before_softmax"}
        f = f + reference.attention(attention.position.parts(), mask, v, v, v, sequence)  # 6, 7
        hidden = reference.layer_norm(f, feed.LayerNorm)
        hidden = (hidden @ feed.dense_1.weight.T + feed.dense_1.bias).clamp(min=0)
        f = f + hidden @ feed.dense_2.weight.T + feed.dense_2.bias  # 8, with residual connections
    return reference.layer_norm(f, model.LayerNorm) @ vectors.T  # 9, 10


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
def test_products_without_the_zeros(
    experiment, monkeypatch, n_heads: int, size: int, options: dict
) -> None:
    """Loss and gradients of long histories, in blocks of rows, are those of full squares."""
    given = {"hidden_dropout_prob": 0.0, "attn_dropout_prob": 0.0, "n_heads": n_heads}
    made = experiment("FPARec", **given, **options)
    model = made.model.double()
    batch = max(made.trainer.training_loader(made.loaders["train"]), key=lambda b: b.width)
    found, products = [], []

    def counted(*given: Any) -> Tensor:
        products.append(given)
        return triangular.triangular_product(*given)

    monkeypatch.setattr(positional_attention, "triangular_product", counted)
    for block in (10**6, size):
        monkeypatch.setitem(triangular.BLOCK, "cpu", block)
        loss = model.window_loss(batch)
        found.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
        used = block == size and batch.width >= BLOCKS * size
        heads = 1 if "position" in options else n_heads
        assert len(products) == used * heads * len(model.trm_encoder.layer)
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


def test_a_constant_time_field_stops_a_time_aware_model(experiment, tmp_path) -> None:
    frame = make_log()
    frame["timestamp"] = 5.0
    folder = str(write_atomic(frame, tmp_path, "still"))
    with pytest.raises(UsageError, match="the same for all events"):
        experiment("TORoPE", "still", data_path=folder)
    with pytest.raises(UsageError, match="for all events"):  # RecBole's own entry builds it alone
        made = experiment("PosSASRec", "still", data_path=folder)
        made.config["position"] = ["time_learned"]
        made.config["time_buckets"], made.config["time_from"] = 8, "first"
        type(made.model)(made.config, made.dataset)


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
    "model",
    [
        *("PosRec", "FGNN", "AnchoredSRGNN", "AnchoredGCSAN", "EncodedSTAMP", "EncodedSASRec"),
        *("SessionBPR", "SessionFPMC", "AttrFormer"),
    ],
)
def test_one_batch_is_learnt_by_heart(experiment, model: str) -> None:
    """Every parameter moves, and only finite ones are left."""
    drop = [key for key in plugin_defaults(model) if "dropout" in key]
    given = {"learning_rate": 0.03, **dict.fromkeys(drop, 0.0), **CROSS_ENTROPY.get(model, {})}
    made = experiment(model, **given)
    loader = made.trainer.training_loader(made.loaders["train"])
    before = {name: p.clone() for name, p in made.model.named_parameters()}
    loss = made.trainer.adapter.loss(made.loaders["train"].packed)
    losses = learn(made.trainer, loss, next(iter(loader)), 100)
    assert losses[-1] < 0.4 * losses[0]
    for name, p in made.model.named_parameters():
        assert p.isfinite().all() and not torch.equal(p, before[name]), name


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

    sizes = {"hidden_size": 16, "inner_size": 16, "train_batch_size": 16, "data_path": str(tiny)}
    given, dataset = {**sizes, **options}, "tiny"
    if model == "AttrFormer":  # on data whose relations reach other users
        given, dataset = shop_options(write(tmp_path, tables()), hidden_dropout_prob=0.2), "shop"

    def run(name: str) -> Any:
        folder = tmp_path / name
        return recbole_pos.run(model, dataset, None, {**given, "epochs": 4}, folder, verbose=False)

    monkeypatch.setattr(PosTrainer, "_step", stopping)
    whole = run("whole")
    if model == "PosRec":
        assert rates == {0: 1e-3, 1: 1e-3, 2: 1e-4, 3: 1e-4}
    stop_at = (2, 1)
    with pytest.raises(KeyboardInterrupt):
        run("broken")
    stop_at = None
    resumed = recbole_pos.run(resume=tmp_path / "broken", verbose=False)
    assert resumed.test == whole.test and all(0 <= value <= 1 for value in whole.test.values())
    one, two = (recbole_pos.load(tmp_path / name) for name in ("whole", "broken"))
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(a, b)
    again = one.trainer.evaluate(one.loaders["test"], load_best_model=False)
    assert dict(again) == whole.test
