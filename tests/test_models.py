"""Whole models: FPARec against equations 5 to 10, times of the data, learning and resuming."""

import math

import numpy as np
import pytest
import reference
import torch
from conftest import make_log, write_atomic
from torch import Tensor


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
