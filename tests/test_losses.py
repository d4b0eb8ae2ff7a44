"""Losses: full and scalable cross-entropy and posterior targets against loops; memory; options."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from conftest import SMALL, make_log, small, write_atomic
from torch import Tensor

import recbole_pos
from recbole_pos.data.splits import TRAIN
from recbole_pos.layers import large_products, losses, scalable
from recbole_pos.layers.sampled import SampledLoss
from recbole_pos.yaml_files import read_yaml

SIZES = {"n_buckets": 128, "bucket_size_x": 128, "bucket_size_y": 512, "mix_x": True}


def example(m: int = 40, items: int = 23, d: int = 6, n: int = 5) -> tuple[Tensor, ...]:
    """Hidden states, item vectors, targets and buckets in float64."""
    torch.manual_seed(0)
    hidden = torch.randn(m, d, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(items, d, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(1, items, (m,))
    return hidden, weight, targets, torch.randn(n, d, dtype=torch.float64)


def compare(got: Tensor, want: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Value and gradients; returns those of the first."""
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    found, wanted = (torch.autograd.grad(3 * loss, inputs) for loss in (got, want))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    return list(found)


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Torch's own; item 0 is padding and no candidate."""
    return F.cross_entropy(hidden @ weight[1:].T, targets - 1)


@pytest.mark.parametrize("chunk", [64, 2**20])
def test_full_cross_entropy_equals_torchs(monkeypatch, chunk: int) -> None:
    """Value and both gradients, with several chunks and with one."""
    monkeypatch.setitem(large_products.CHUNK_ELEMENTS, "cpu", chunk)
    hidden, weight, targets, _ = example(m=150)
    loss = losses.full_cross_entropy(hidden, weight, targets)
    compare(loss, cross_entropy(hidden, weight, targets), hidden, weight)


@pytest.mark.parametrize(
    ("betas", "prior_weight"), [([1.0, 0.25, 0.1], 1.0), ([1.0], 0.3), ([2.0, 2.0], 0.0)]
)
def test_posterior_targets_equal_equation_17(double, monkeypatch, betas, prior_weight) -> None:
    """Positions near the end have fewer items after them; in one chunk and in many."""
    m, items, n = 9, 7, len(betas)
    hidden = torch.randn(m, 4, requires_grad=True)
    weight = torch.randn(items, 4, requires_grad=True)
    counts = torch.tensor([0, 3, 0, 9, 1, 1, 5])
    targets = torch.randint(1, items, (m, n))
    known = torch.arange(n) < torch.randint(1, n + 1, (m, 1))
    futures = [row[real].tolist() for row, real in zip(targets, known, strict=True)]
    want = reference.posterior(hidden, weight, futures, betas, counts.tolist(), prior_weight)
    given = targets, known * torch.tensor(betas), losses.dirichlet_prior(counts), prior_weight
    want_grads = torch.autograd.grad(want, (hidden, weight))
    for rows in (128, 2):
        monkeypatch.setattr(losses, "MIN_ROWS", rows)
        monkeypatch.setitem(large_products.CHUNK_ELEMENTS, "cpu", rows * items)
        loss = losses.posterior_loss(hidden, weight, *given)
        torch.testing.assert_close(loss, want)
        grads = torch.autograd.grad(3 * loss, (hidden, weight))
        torch.testing.assert_close(grads[0], 3 * want_grads[0])
        torch.testing.assert_close(grads[1][1:], 3 * want_grads[1][1:])
        assert (grads[1][0] == 0).all()  # padding learns nothing


def test_full_cross_entropy_in_bfloat16(monkeypatch) -> None:
    """Factors of products are rounded and nothing else: sums have all digits of float32."""
    monkeypatch.setitem(large_products.CHUNK_ELEMENTS, "cpu", 64)
    hidden, weight, targets, _ = (x.detach() for x in example(m=150, d=16))
    hidden, weight = (x.float().requires_grad_() for x in (hidden, weight))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = losses.full_cross_entropy(hidden, weight, targets)
    got = torch.autograd.grad(loss, (hidden, weight))
    assert loss.dtype == got[0].dtype == got[1].dtype == torch.float32
    rounded = [x.detach().bfloat16().double().requires_grad_() for x in (hidden, weight)]
    want = cross_entropy(*rounded, targets)
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)
    for one, other in zip(got, torch.autograd.grad(want, rounded), strict=True):
        assert 0 < (one - other).norm() < 0.01 * other.norm()  # probabilities are rounded, too


MEMORY: list[tuple[Callable[..., Tensor], int, int, int]] = [
    (losses.full_cross_entropy, 4096, 4000, 8),
    (functools.partial(scalable.scalable_cross_entropy, **SIZES), 1024, 200_000, 4),
    *((SampledLoss(x, torch.ones(400_000), 1024), 8192, 400_000, 16) for x in ("gBCE", "in_batch")),
]


@pytest.mark.parametrize(("loss", "m", "items", "d"), MEMORY, ids=("CE", "SCE", "gBCE", "in_batch"))
def test_losses_hold_no_tensor_of_positions_by_items(loss, m: int, items: int, d: int) -> None:
    """No batch of logits, of vectors of negatives, or more than the gradient of the items."""
    hidden, weight = (torch.randn(n, d, requires_grad=True) for n in (m, items))
    targets = torch.randint(1, items, (m,))
    with torch.profiler.profile(profile_memory=True) as profile:
        loss(hidden, weight, targets).backward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    several_chunks = 32 * large_products.chunk_elements(hidden.device)  # bytes
    assert largest <= max(1.2 * items * d * 4, several_chunks) < m * items * 4


def test_losses_survive_large_logits() -> None:
    """Float32 logits of +-1000: the probability of the target underflows, the loss must not."""
    hidden = torch.tensor([[1000.0, 0.0]] * 2, requires_grad=True)
    weight, counts = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0]]), torch.ones(3)
    targets = torch.tensor([2, 1])
    values = [losses.full_cross_entropy(hidden, weight, targets)]
    values.append(scalable.scalable_cross_entropy(hidden, weight, targets, **SIZES))
    for kind in ("gBCE", "sampled_softmax", "in_batch"):
        compute = SampledLoss(kind, counts, 2).compute
        values.append(compute(hidden, weight, targets, torch.tensor([[1, 2]])))
        alone = compute(hidden, weight, torch.tensor([1, 1]), torch.tensor([[1, 1]]))
        assert alone.item() == 0  # the only negatives of the batch are its targets
        assert torch.autograd.grad(alone, hidden)[0].isfinite().all()
    for value in values:
        assert value.item() > 300
        assert torch.autograd.grad(value, hidden)[0].isfinite().all()


# Scalable cross-entropy


@pytest.mark.parametrize("chunk", [64, 2**20])
@pytest.mark.parametrize(("size_x", "size_y"), [(1, 1), (7, 5), (30, 20), (99, 9)])
def test_sce_equals_the_loops(monkeypatch, chunk: int, size_x: int, size_y: int) -> None:
    """Positions in none, one and several buckets; in one chunk and in many."""
    monkeypatch.setitem(large_products.CHUNK_ELEMENTS, "cpu", chunk // 4)
    hidden, weight, targets, buckets = example()
    want, covered = reference.bucket_cross_entropy(hidden, weight, targets, buckets, size_x, size_y)
    assert (len(covered) == len(targets)) == (size_x >= 30)
    got = scalable.bucket_cross_entropy(hidden, weight, targets, buckets, size_x, size_y)
    grad, by_item = compare(got, want, hidden, weight)
    outside = [i for i in range(len(targets)) if i not in covered]
    assert (grad[outside] == 0).all()
    loss = scalable.bucket_cross_entropy(hidden, weight.detach(), targets, buckets, size_x, size_y)
    assert torch.equal(torch.autograd.grad(3 * loss, hidden)[0], grad)  # what is requested only
    with torch.no_grad():
        weight[0] = 100 * buckets[0]  # padding is no candidate, however large
    loss = scalable.bucket_cross_entropy(hidden, weight, targets, buckets, size_x, size_y)
    assert torch.equal(loss, got) and (by_item[0] == 0).all()


def test_ties_share_the_gradient() -> None:
    hidden, weight, targets, buckets = example()
    once, twice = (
        scalable.bucket_cross_entropy(hidden, weight, targets, given, 9, 4)
        for given in (buckets, torch.cat([buckets, buckets]))
    )
    compare(twice, once, hidden, weight)


@pytest.mark.parametrize(
    ("chunk", "k", "order"),
    [(64, 7, "random"), (64, 1, "rising"), (1000, 300, "falling"), (1000, 300, "equal")],
)
def test_largest_products_are_exact(monkeypatch, chunk: int, k: int, order: str) -> None:
    """Against a full sort, for every way of meeting the large products."""
    monkeypatch.setitem(large_products.CHUNK_ELEMENTS, "cpu", chunk // 4)
    torch.manual_seed(0)
    values, other = torch.randn(2, 5000, dtype=torch.float64)
    if order == "equal":
        values = values.round()
    elif order != "random":
        values = values.sort(descending=order == "falling").values
    buckets = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.5, 2.0]], dtype=torch.float64)
    rows = torch.stack([values, other], 1)
    products, index = buckets @ rows.T, scalable.find_largest_products(buckets, rows, k)
    want = products.sort(1, descending=True).values[:, :k]
    assert torch.equal(products.gather(1, index).sort(1, descending=True).values, want)
    assert all(len(set(row)) == len(row) for row in index.tolist())


def test_values_that_are_no_numbers_end_in_the_loss(monkeypatch) -> None:
    monkeypatch.setitem(large_products.CHUNK_ELEMENTS, "cpu", 250)
    hidden, weight, targets, buckets = (x.detach() for x in example(items=5000))
    weight[1000:] = 0  # no product that would draw the eye to the chunk
    weight[2500, 0] = torch.nan
    assert scalable.bucket_cross_entropy(hidden, weight, targets, buckets, 9, 4).isnan()


# Several targets of a state


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data_path of a dataset where one interaction in three is a purchase, of few items."""
    frame, rng = make_log(seed=3), np.random.default_rng(0)
    is_cheap = frame.item_id.str.len() < 3  # i0 to i9
    frame["bought"] = (rng.random(len(frame)) < np.where(is_cheap, 0.8, 0.1)).astype(int)
    return write_atomic(frame, tmp_path_factory.mktemp("shop"))


COLUMNS = {"inter": ["user_id", "item_id", "timestamp", "bought"]}
PURCHASES = {"target_events": {"bought": 1}, "load_col": COLUMNS}

SEVERAL_TARGETS = [{}, {"train_windows": "sliding", "window_stride": 5}, PURCHASES]


@pytest.mark.parametrize("options", SEVERAL_TARGETS, ids=str)
def test_later_targets_end_where_training_does(experiment: Any, shop: Path, options: dict) -> None:
    """Against loops: no item of another user, none that is held out or no target; their mean."""
    split = {"split": {"RS": [0.7, 0.1, 0.2]}}
    options = {"data_path": str(shop), "hidden_dropout_prob": 0.0, **options}
    made = experiment("PosSASRec", target_window=3, eval_args=split, **options)
    model, log, part = made.model, made.dataset.log, made.dataset.part
    is_target = np.ones(len(log), dtype=bool)
    if "target_events" in options:
        is_target = log.fields["bought"].numpy() == 1
    assert (part != TRAIN).any()
    vectors, short = model.item_embedding.weight, 0
    for batch in made.trainer.training_loader(made.loaders["train"]):
        events, states = batch.take_queries(batch.log_rows), model.encode(batch)
        pairs = []
        for i, event in enumerate((events + 1).tolist()):
            user_end = int(log.offsets[log.users[event] + 1])
            own = [row for row in range(event, user_end) if part[row] == TRAIN and is_target[row]]
            own = torch.tensor(own[:3])
            assert log.items[own[0]] == batch.targets[i]
            short += len(own) < 3
            pairs += [(i, item) for item in log.items[own].tolist()]
        state, item = torch.tensor(pairs).T
        want = losses.full_cross_entropy(states[state], vectors, item)
        want = want * len(pairs) / len(events) / 3
        torch.testing.assert_close(model.window_loss(batch), want)
    assert short > 2


# Losses against sampled items


SAMPLED = [
    ("BCE", "uniform", 1, "none"),
    ("BCE", "popularity", 7, "none"),
    ("gBCE", "uniform", 5, "none"),
    ("sampled_softmax", "uniform", 4, "refined"),
    *(("sampled_softmax", "popularity", 60, correction) for correction in ("none", "refined")),
    ("sampled_softmax", "popularity", 9, "standard"),
    *(("in_batch", "uniform", 0, correction) for correction in ("none", "standard", "refined")),
]


def make_sampled(kind: str, sampler: str, n: int, correction: str, items: int = 23) -> SampledLoss:
    """The loss, after counts of which one is zero."""
    counts = torch.randint(0, 9, (items,), generator=torch.Generator().manual_seed(1))
    counts[3] = 0
    t = 0.7 if kind == "gBCE" else 0.0
    return SampledLoss(kind, counts, n or 1, sampler, correction, t)


@pytest.mark.parametrize("chunk", [64, 2**20])
@pytest.mark.parametrize(("kind", "sampler", "n", "correction"), SAMPLED, ids=str)
def test_sampled_losses_equal_the_loops(monkeypatch, chunk, kind, sampler, n, correction) -> None:
    """Value and gradients given the sampled items, which are their position's target at times."""
    monkeypatch.setitem(large_products.CHUNK_ELEMENTS, "cpu", chunk // 4)
    monkeypatch.setattr("recbole_pos.layers.sampled.MIN_ROWS", 3)
    hidden, weight, targets, _ = example()
    loss, m = make_sampled(kind, sampler, n, correction), len(targets)
    if kind == "in_batch":
        got, own = loss(hidden, weight, targets), [targets.tolist()] * m
    else:
        items = loss.sample(targets)
        assert items.shape[1] == n and (items > 0).all()
        monkeypatch.setattr(torch, "get_num_threads", lambda: 7)  # decides nothing that is drawn
        assert len(items) == len(loss.sample(targets)) == -(-m // min(n, max(3, chunk // n)))
        own = [items[i % len(items)].tolist() for i in range(m)]
        got = loss.compute(hidden, weight, targets, items)
        torch.manual_seed(5)
        once = loss(hidden, weight, targets)
        torch.manual_seed(5)
        assert torch.equal(once, loss.compute(hidden, weight, targets, loss.sample(targets)))
    assert any(int(target) in ids for target, ids in zip(targets, own, strict=True)) or n < 4
    want = reference.sampled_loss(loss, hidden, weight, targets, own)
    if correction != "refined":
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    found, wanted = (torch.autograd.grad(3 * x, (hidden, weight)) for x in (got, want))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    touched = {*targets.tolist(), *(j for ids in own for j in ids)}
    assert (found[1].any(1).nonzero()[:, 0] == torch.tensor(sorted(touched))).all()
    if n:  # what is requested only
        got = loss.compute(hidden, weight.detach(), targets, items)
        assert torch.equal(torch.autograd.grad(3 * got, hidden)[0], found[0])


def test_items_are_sampled_as_they_should() -> None:
    """Frequencies within five standard deviations; about as many as there are positions."""
    targets = torch.randint(1, 23, (30_000,)) % 7 + 1
    for sampler in ("uniform", "popularity"):
        loss = make_sampled("sampled_softmax", sampler, 64, "none")
        items = loss.sample(targets)
        assert len(targets) <= items.numel() < len(targets) + 64
        weights = loss.counts.double() + 1 if sampler == "popularity" else torch.ones(23).double()
        weights[0] = 0
        q, count = weights / weights.sum(), items.flatten().bincount(minlength=23)
        torch.testing.assert_close(loss.log_q.exp(), q)
        spread = (items.numel() * q * (1 - q)).sqrt()
        assert ((count - items.numel() * q).abs() <= 5 * spread).all(), sampler


TRAINED_ON = [
    PURCHASES,
    {"train_windows": "last", **PURCHASES},
    {"train_windows": "sliding", "window_stride": 5, "target_window": 3},
]


@pytest.mark.parametrize("options", TRAINED_ON, ids=str)
def test_q_is_the_share_of_each_item_among_the_targets_of_an_epoch(
    experiment: Any, monkeypatch: pytest.MonkeyPatch, shop: Path, options: dict
) -> None:
    """Negatives are targets of the batch, whatever is a target."""
    made = experiment("PosSASRec", data_path=str(shop), loss_type="in_batch", **options)
    targets: list[Tensor] = []

    def keep_targets(loss: SampledLoss, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        targets.append(target)
        return hidden.sum()

    monkeypatch.setattr(SampledLoss, "__call__", keep_targets)
    loader = made.loaders["train"]
    compute_loss = made.trainer.adapter.choose_loss(loader.packed)
    for batch in loader.iterate_batches(torch.device("cpu")):
        compute_loss(batch)
    counts = torch.cat(targets).bincount(minlength=made.dataset.item_num).double()
    q = counts / counts.sum()
    torch.testing.assert_close(made.model.loss.log_q[counts > 0].exp(), q[counts > 0])


def test_a_large_catalogue_is_trained_by_sce(tiny: Path, tmp_path: Path, capsys) -> None:
    """With the reason in the first line and the loss in config.yaml."""
    options = {**SMALL, "data_path": str(tiny), "epochs": 1, "sce_above": 39}
    recbole_pos.run("FPARec", "tiny", None, options, run_dir=tmp_path / "run")
    reason = "loss SCE instead of CE for more than 39 items (sce_above)"
    first_line = capsys.readouterr().out.partition("\n")[0]
    assert f"{reason}, hidden_dropout_prob 0.5 for 12.2 interactions a user" in first_line
    kept = read_yaml(tmp_path / "run" / "config.yaml")
    assert kept["loss_type"] == "SCE" and kept["bucket_size_y"] == 256


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("FPARec", {"sce_above": 40}),  # as many as there are
        ("FPARec", {"sce_above": None}),
        ("FPARec", {"sce_above": 39, "target_window": 2}),
        ("AttrFormer", {"sce_above": 39}),
        ("SASRec", {}),
    ],
    ids=str,
)
def test_other_runs_keep_cross_entropy(experiment: Any, model: str, options: dict) -> None:
    assert experiment(model, **options).config.plain["loss_type"] == "CE"


def test_a_loss_that_is_given_is_not_replaced(tiny: Path) -> None:
    config = small("FPARec", data_path=str(tiny), loss_type="CE")
    config.adapt({"users": 10, "items": 100_001, "events": 1_000})
    assert config["loss_type"] == "CE"
