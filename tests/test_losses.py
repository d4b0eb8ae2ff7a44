"""Losses: full and scalable cross-entropy and posterior targets against loops; memory; options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from pathlib import Path

import pytest
import reference
import torch
from conftest import CROSS_ENTROPY
from recbole.data.interaction import Interaction

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.batch import SequenceBatch
from recbole_pos.data.splits import TRAIN
from recbole_pos.errors import UsageError
from recbole_pos.layers import chunks, losses, sce
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.sampled import SAMPLED as losses_against_some
from recbole_pos.layers.sampled import SampledLoss
from recbole_pos.model.models import LOSSES
from recbole_pos.yaml_files import ROOT, read_yaml

PAPER = {"n_buckets": None, "bucket_size_x": None, "bucket_size_y": 256, "mix_x": True}


def example(m: int = 40, items: int = 23, d: int = 6, n: int = 5) -> tuple[torch.Tensor, ...]:
    """Hidden states, item vectors, targets and buckets in float64."""
    torch.manual_seed(0)
    hidden = torch.randn(m, d, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(items, d, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(1, items, (m,))
    return hidden, weight, targets, torch.randn(n, d, dtype=torch.float64)


def compare(got: torch.Tensor, want: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Value and gradients; returns those of the first."""
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    found, wanted = (torch.autograd.grad(3 * loss, inputs) for loss in (got, want))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    return list(found)


@pytest.mark.parametrize("chunk", [64, 2**20])
def test_full_cross_entropy_equals_equation_11(monkeypatch, chunk: int) -> None:
    """Value and both gradients, with several chunks and with one."""
    monkeypatch.setitem(chunks.CHUNK_ELEMENTS, "cpu", chunk)
    hidden, weight, targets, _ = example(m=150)
    loss = losses.full_cross_entropy(hidden, weight, targets)
    want = reference.cross_entropy(hidden, weight, targets)
    _, grad = compare(loss, want, hidden, weight)
    assert (grad[0] == 0).all()  # padding is no candidate


@pytest.mark.parametrize(
    ("betas", "prior_weight"),
    [([1.0, 0.25, 0.1], 1.0), ([1.0], 0.3), ([0.5], 1.0), ([2.0, 2.0], 0.0), ([1.0], 0.0)],
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
        monkeypatch.setitem(chunks.CHUNK_ELEMENTS, "cpu", rows * items)
        loss = losses.posterior_loss(hidden, weight, *given)
        torch.testing.assert_close(loss, want)
        grads = torch.autograd.grad(3 * loss, (hidden, weight))
        torch.testing.assert_close(grads[0], 3 * want_grads[0])
        torch.testing.assert_close(grads[1][1:], 3 * want_grads[1][1:])
        assert (grads[1][0] == 0).all()  # padding learns nothing


@pytest.mark.parametrize("loss", [losses.full_cross_entropy, sce.scalable_cross_entropy])
def test_losses_survive_large_logits(loss) -> None:
    """Float32 logits of +-1000: the probability of the target underflows, the loss must not."""
    hidden = torch.tensor([[1000.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    options = PAPER if loss is sce.scalable_cross_entropy else {}
    value = loss(hidden, weight, torch.tensor([2]), **options)
    assert value.item() == 2000
    value.backward()
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("chunk", [64, 2**20])
def test_full_cross_entropy_in_bfloat16(monkeypatch, chunk: int) -> None:
    """Factors of products are rounded and nothing else: sums have all digits of float32."""
    monkeypatch.setitem(chunks.CHUNK_ELEMENTS, "cpu", chunk)
    hidden, weight, targets, _ = (x.detach() for x in example(m=150, d=16))
    hidden, weight = (x.float().requires_grad_() for x in (hidden, weight))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = losses.full_cross_entropy(hidden, weight, targets)
    got = torch.autograd.grad(loss, (hidden, weight))
    assert loss.dtype == got[0].dtype == got[1].dtype == torch.float32
    rounded = [x.detach().bfloat16().double().requires_grad_() for x in (hidden, weight)]
    want = reference.cross_entropy(*rounded, targets)
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)
    for one, other in zip(got, torch.autograd.grad(want, rounded), strict=True):
        assert 0 < (one - other).norm() < 0.01 * other.norm()  # probabilities are rounded, too


def test_losses_hold_no_tensor_of_positions_by_items() -> None:
    """Full: far below m x items. Scalable: no more than the gradient of the item vectors."""
    m, items, d = 4096, 4000, 8
    hidden, weight = (torch.randn(n, d, requires_grad=True) for n in (m, items))
    with torch.profiler.profile(profile_memory=True) as profile:
        losses.full_cross_entropy(hidden, weight, torch.randint(1, items, (m,))).backward()
    assert max(event.cpu_memory_usage for event in profile.events()) < m * items * 4 / 8
    m, items, d = 1024, 200_000, 4
    hidden, weight = (torch.randn(n, d, requires_grad=True) for n in (m, items))
    options = {**PAPER, "n_buckets": 128, "bucket_size_x": 128, "bucket_size_y": 512}
    with torch.profiler.profile(profile_memory=True) as profile:
        targets = torch.randint(1, items, (m,))
        sce.scalable_cross_entropy(hidden, weight, targets, **options).backward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest <= max(items * d * 4, 8 * chunks.CHUNK_ELEMENTS["cpu"])


# Scalable cross-entropy


@pytest.mark.parametrize("chunk", [64, 2**20])
@pytest.mark.parametrize(
    ("size_x", "size_y", "fell"), [(1, 1, "some"), (7, 5, "some"), (30, 20, "all"), (99, 9, "all")]
)
def test_sce_equals_the_loops(monkeypatch, chunk: int, size_x: int, size_y: int, fell: str) -> None:
    """Positions in none, one and several buckets; in one chunk and in many."""
    monkeypatch.setitem(chunks.CHUNK_ELEMENTS, "cpu", chunk)
    hidden, weight, targets, buckets = example()
    want, covered = reference.bucket_cross_entropy(hidden, weight, targets, buckets, size_x, size_y)
    assert (len(covered) == len(targets)) == (fell == "all")
    got = sce.bucket_cross_entropy(hidden, weight, targets, buckets, size_x, size_y)
    grad, by_item = compare(got, want, hidden, weight)
    outside = [i for i in range(len(targets)) if i not in covered]
    assert (grad[outside] == 0).all()
    loss = sce.bucket_cross_entropy(hidden, weight.detach(), targets, buckets, size_x, size_y)
    assert torch.equal(torch.autograd.grad(3 * loss, hidden)[0], grad)  # what is requested only
    with torch.no_grad():
        weight[0] = 100 * buckets[0]  # padding is no candidate, however large
    loss = sce.bucket_cross_entropy(hidden, weight, targets, buckets, size_x, size_y)
    assert torch.equal(loss, got) and (by_item[0] == 0).all()


@pytest.mark.parametrize(("n_buckets", "mix_x"), [(1, True), (4, False)])
def test_sce_is_exact_when_buckets_hold_everything(n_buckets: int, mix_x: bool) -> None:
    hidden, weight, targets, _ = example(m=150)
    options = {"n_buckets": n_buckets, "bucket_size_x": 150, "bucket_size_y": 22, "mix_x": mix_x}
    got = sce.scalable_cross_entropy(hidden, weight, targets, **options)
    compare(got, losses.full_cross_entropy(hidden, weight, targets), hidden, weight)


def test_ties_share_the_gradient() -> None:
    hidden, weight, targets, buckets = example()
    once, twice = (
        sce.bucket_cross_entropy(hidden, weight, targets, given, 9, 4)
        for given in (buckets, torch.cat([buckets, buckets]))
    )
    compare(twice, once, hidden, weight)


@pytest.mark.parametrize("order", ["random", "rising", "falling", "equal"])
@pytest.mark.parametrize(("chunk", "k"), [(64, 7), (1000, 300), (5000, 1), (2**20, 6000), (64, 1)])
def test_largest_products_are_exact(monkeypatch, chunk: int, k: int, order: str) -> None:
    """Against a full sort, for every way of meeting the large products."""
    monkeypatch.setitem(chunks.CHUNK_ELEMENTS, "cpu", chunk)
    torch.manual_seed(0)
    values = torch.randn(5000, dtype=torch.float64)
    values = {
        "random": values,
        "rising": values.sort().values,
        "falling": values.sort(descending=True).values,
        "equal": values.round(),
    }[order]
    buckets = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.5, 2.0]], dtype=torch.float64)
    rows = torch.stack([values, torch.randn(5000, dtype=torch.float64)], 1)
    products = buckets @ rows.T
    index = sce.largest_products(buckets, rows, k)
    assert index.shape == (3, min(k, 5000))
    want = products.sort(1, descending=True).values[:, :k]
    assert torch.equal(products.gather(1, index).sort(1, descending=True).values, want)
    assert all(len(set(row)) == len(row) for row in index.tolist())


@pytest.mark.parametrize("chunk", [1000, 2**20])
def test_values_that_are_no_numbers_end_in_the_loss(monkeypatch, chunk: int) -> None:
    monkeypatch.setitem(chunks.CHUNK_ELEMENTS, "cpu", chunk)
    hidden, weight, targets, buckets = example(items=5000)
    weight.data[1000:] = 0  # no product that would draw the eye to the chunk
    for tensor, row in ((hidden, 3), (weight, 2500)):
        broken = tensor.detach().clone()
        broken[row, 0] = torch.nan
        given = (broken, weight) if tensor is hidden else (hidden, broken)
        assert sce.bucket_cross_entropy(*given, targets, buckets, 9, 4).isnan()


def test_sce_under_autocast_and_by_seed() -> None:
    hidden, weight, targets, _ = (t.detach() for t in example(m=200, items=500))
    hidden, weight, options = hidden.bfloat16(), weight.float(), {**PAPER, "bucket_size_y": 5}
    found = []
    for seed, enabled in ((1, True), (1, False), (2, False)):
        torch.manual_seed(seed)
        given = hidden if enabled else hidden.float()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            found.append(sce.scalable_cross_entropy(given, weight, targets, **options))
    assert found[0].dtype == torch.float32 and found[0] == found[1] != found[2]


@pytest.mark.parametrize("mix_x", [True, False])
def test_recommended_sizes_and_directions(monkeypatch, mix_x: bool) -> None:
    """2 sqrt(m) rounded up where nothing is given; mixtures lie in the span of the positions."""
    seen = []
    monkeypatch.setattr(sce, "bucket_cross_entropy", lambda *given: seen.append(given))
    _, weight, targets, _ = example(m=30)
    hidden = torch.zeros(30, 6, dtype=torch.float64)
    hidden[:, 2] = torch.randn(30)
    for options in ({}, {"n_buckets": 3, "bucket_size_x": 4}):
        sce.scalable_cross_entropy(hidden, weight, targets, **{**PAPER, "mix_x": mix_x, **options})
    buckets = seen[0][3]
    assert buckets.shape == (11, 6) and seen[0][4:] == (11, 256)
    assert seen[1][3].shape == (3, 6) and seen[1][4:] == (4, 256)
    assert ((buckets != 0).sum(0).bool().tolist() == [False] * 2 + [True] + [False] * 3) == mix_x


# Several targets of a state


@pytest.mark.parametrize("windows", [{}, {"train_windows": "sliding", "window_stride": 5}], ids=str)
def test_later_targets_end_where_training_does(experiment, windows: dict) -> None:
    """Against loops: no item of another user, none that is held out; their mean."""
    split = {"split": {"RS": [0.7, 0.1, 0.2]}}
    made = experiment(
        "PosSASRec", target_window=3, eval_args=split, hidden_dropout_prob=0.0, **windows
    )
    model, log, part = made.model, made.dataset.log, made.dataset.part
    assert (part != TRAIN).any()
    vectors, short = model.item_embedding.weight, 0
    for batch in made.trainer.training_loader(made.loaders["train"]):
        events = batch.events if batch.positions is None else batch.events[batch.positions]
        futures = []
        for event in (events + 1).tolist():
            own = range(event, min(event + 3, len(log)))
            futures.append(
                [
                    int(log.items[i])
                    for i in own
                    if log.users[i] == log.users[event] and part[i] == TRAIN
                ]
            )
        assert [future[0] for future in futures] == batch.targets.tolist()
        short += sum(len(future) < 3 for future in futures)
        ctx = SequenceContext.from_lengths(
            batch.lengths, model.max_seq_length, None, batch.items, width=batch.width
        )
        states = model.states(batch.items, ctx, batch.positions)
        pairs = [(i, item) for i, future in enumerate(futures) for item in future]
        state, item = (torch.tensor(part) for part in zip(*pairs, strict=True))
        want = losses.full_cross_entropy(states[state], vectors, item)
        want = want * len(pairs) / len(futures) / 3
        torch.testing.assert_close(model.window_loss(batch), want)
        one = losses.full_cross_entropy
        model.loss = functools.partial(one)  # as one that cannot have several at once
        torch.testing.assert_close(model.window_loss(batch), want)
        model.loss = one
    assert short > 2


# Losses against sampled items


SAMPLED = [
    *(("BCE", sampler, 1, "none") for sampler in ("uniform", "popularity")),
    ("BCE", "in_batch", 7, "none"),
    ("gBCE", "uniform", 5, "none"),
    *(("sampled_softmax", "uniform", 4, correction) for correction in ("none", "refined")),
    *(("sampled_softmax", "popularity", 60, name) for name in ("none", "standard", "refined")),
    ("sampled_softmax", "in_batch", 9, "standard"),
    *(("in_batch", "in_batch", 0, correction) for correction in ("none", "standard", "refined")),
]


def sampled(kind: str, sampler: str, n: int, correction: str, items: int = 23) -> SampledLoss:
    """The loss, after counts of which one is zero."""
    counts = torch.randint(0, 9, (items,), generator=torch.Generator().manual_seed(1))
    counts[3] = 0
    t = 0.7 if kind == "gBCE" else 0.0
    return SampledLoss(kind, counts, n or 1, sampler, correction, t)


@pytest.mark.parametrize("chunk", [64, 2**20])
@pytest.mark.parametrize(("kind", "sampler", "n", "correction"), SAMPLED, ids=str)
def test_sampled_losses_equal_the_loops(monkeypatch, chunk, kind, sampler, n, correction) -> None:
    """Value and gradients given the sampled items, which are their position's target at times."""
    monkeypatch.setitem(chunks.CHUNK_ELEMENTS, "cpu", chunk)
    monkeypatch.setattr("recbole_pos.layers.sampled.MIN_ROWS", 3)
    hidden, weight, targets, _ = example()
    loss, m = sampled(kind, sampler, n, correction), len(targets)
    if kind == "in_batch":
        got, own = loss(hidden, weight, targets), [targets.tolist()] * m
    else:
        items = loss.sample(targets)
        assert items.shape[1] == n and (items > 0).all()
        assert len(items) == -(-m // min(n, max(3, chunk // n)))
        own = [items[i % len(items)].tolist() for i in range(m)]
        got = loss.against(hidden, weight, targets, items)
        torch.manual_seed(5)
        once = loss(hidden, weight, targets)
        torch.manual_seed(5)
        assert torch.equal(once, loss.against(hidden, weight, targets, loss.sample(targets)))
    assert any(int(target) in ids for target, ids in zip(targets, own, strict=True)) or n < 4
    q = loss.log_q.exp().tolist()
    want = reference.sampled_loss(kind, hidden, weight, targets, own, q, correction, loss.gbce_t)
    if correction != "refined":
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    found, wanted = (torch.autograd.grad(3 * x, (hidden, weight)) for x in (got, want))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    touched = {*targets.tolist(), *(j for ids in own for j in ids)}
    assert (found[1].any(1).nonzero()[:, 0] == torch.tensor(sorted(touched))).all()
    if n:  # what is requested only
        got = loss.against(hidden, weight.detach(), targets, items)
        assert torch.equal(torch.autograd.grad(3 * got, hidden)[0], found[0])


@pytest.mark.parametrize("sampler", ["uniform", "popularity"])
def test_sampling_is_unbiased(sampler: str) -> None:
    """Over every negative there may be, times its probability: the sums over all other items."""
    hidden, weight, targets, _ = (x.detach() for x in example(m=1))
    z, target = (weight @ hidden[0])[1:], int(targets[0]) - 1
    others = torch.arange(22) != target
    softmax, binary = (
        sampled(kind, sampler, 1, correction)
        for kind, correction in (("sampled_softmax", "refined"), ("BCE", "none"))
    )
    q = softmax.log_q.exp()[1:]
    assert q.sum() == pytest.approx(1) and (q > 0).all()
    mean = {}
    for loss in (softmax, binary):
        every = [loss.against(hidden, weight, targets, torch.tensor([[j]])) for j in range(1, 23)]
        values = torch.stack(every)
        if loss is softmax:
            values = torch.expm1(values) * z[target].exp()
        mean[loss.loss_type] = (q * values).sum()
    torch.testing.assert_close(mean["sampled_softmax"], z[others].exp().sum())
    own = q / (1 - q[target])
    negative = (own * torch.nn.functional.softplus(z))[others].sum()
    want = (torch.nn.functional.softplus(-z[target]) + negative) / 2
    torch.testing.assert_close(mean["BCE"], want)


def test_items_are_sampled_as_they_should() -> None:
    """Frequencies within five standard deviations; about as many as there are positions."""
    targets = torch.randint(1, 23, (30_000,)) % 7 + 1
    for sampler in ("uniform", "popularity", "in_batch"):
        loss = sampled("sampled_softmax", sampler, 64, "none")
        items = loss.sample(targets)
        assert len(targets) <= items.numel() < len(targets) + 64
        q = loss.log_q.exp()
        if sampler == "in_batch":
            q = targets.bincount(minlength=23) / len(targets)
        count = items.flatten().bincount(minlength=23)
        assert count[0] == 0
        spread = (items.numel() * q * (1 - q)).sqrt()
        assert ((count - items.numel() * q).abs() <= 5 * spread).all(), sampler


@pytest.mark.parametrize("kind", ["gBCE", "sampled_softmax", "in_batch"])
def test_sampled_losses_make_neither_logits_nor_vectors_of_pairs(kind: str) -> None:
    """Vectors of negatives are as many as positions; no batch of logits is held."""
    m, items, d, n = 8192, 400_000, 16, 1024
    hidden, weight = (torch.randn(n, d, requires_grad=True) for n in (m, items))
    loss = SampledLoss(kind, torch.ones(items), n)
    targets = torch.randint(1, items, (m,))
    with torch.profiler.profile(profile_memory=True) as profile:
        loss(hidden, weight, targets).backward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest < 1.2 * items * d * 4 < m * n * 4 < m * n * d * 4 / 8


@pytest.mark.parametrize("kind", ["gBCE", "sampled_softmax", "in_batch"])
def test_sampled_losses_with_large_logits_and_with_nothing_to_learn(kind: str) -> None:
    """Float32 logits of +-1000; and a batch whose only negatives are its targets."""
    hidden = torch.tensor([[1000.0, 0.0]] * 2, requires_grad=True)
    weight = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    loss = SampledLoss(kind, torch.ones(3), 2)
    value = loss.against(hidden, weight, torch.tensor([2, 1]), torch.tensor([[1, 2]]))
    value.backward()
    assert value.item() > 300 and hidden.grad.isfinite().all()
    same = torch.tensor([1, 1])
    value = loss.against(hidden, weight, same, torch.tensor([[1, 1]]))
    assert value.item() == 0
    assert torch.autograd.grad(value, hidden)[0].isfinite().all()


@pytest.mark.slow
def test_every_model_and_batch_format_takes_the_loss(experiment) -> None:
    for model in [*recbole_pos.model.models.MODELS, "FGNN"]:
        plain = {**CROSS_ENTROPY.get(model, {}), "hidden_size": 16}
        sizes = {"bucket_size_x": 10**6, "bucket_size_y": 10**6}
        by_rows = {"augmentation": "prefix", **plain}
        if model == "AttrFormer":
            by_rows["chunking"] = False
        made = experiment(model, loss_type="SCE", **sizes, **plain)
        exact = experiment(model, **plain).model.eval()
        exact.load_state_dict(made.model.eval().state_dict())
        packed = next(iter(made.trainer.training_loader(made.loaders["train"])))
        rows = next(iter(experiment(model, **by_rows).loaders["train"]))
        assert isinstance(packed, SequenceBatch) and isinstance(rows, Interaction)
        ours, peer = ((m.window_loss, m.calculate_loss) for m in (made.model, exact))
        for batch, loss, full in zip((packed, rows), ours, peer, strict=True):
            torch.testing.assert_close(loss(batch), full(batch))
        made.model.loss = functools.partial(made.model.loss.func, **{**PAPER, "bucket_size_y": 1})
        for batch, loss, full in zip((packed, rows), ours, peer, strict=True):
            assert loss(batch) < 0.5 * full(batch)


def test_the_yaml_has_the_options_of_the_loss(tiny: Path) -> None:
    """For RecBole's own entry, too; sizes may be empty."""
    from recbole.config import Config

    parameters = inspect.signature(sce.scalable_cross_entropy).parameters.values()
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert set(read_yaml(ROOT / "loss" / "SCE.yaml")) == keywords
    assert {p.stem for p in (ROOT / "loss").iterdir()} == {*LOSSES} - {"CE"}
    assert LOSSES == ("CE", "SCE", *losses_against_some)
    own = {field.name for field in dataclasses.fields(SampledLoss)}
    assert all({*read_yaml(ROOT / "loss" / f"{name}.yaml")} <= own for name in LOSSES[2:])
    config = Config("FPARec", "tiny", config_dict={"loss_type": "SCE", "data_path": str(tiny)})
    assert config["bucket_size_y"] == 256 and config["n_buckets"] is None
    given = PosConfig("FPARec", "ml-100k", None, {"loss_type": "SCE", "bucket_size_x": 7})
    assert given["n_buckets"] is None and given["bucket_size_x"] == 7


@pytest.mark.parametrize(
    ("model", "options", "field"),
    [
        ("PosSASRec", {"n_buckets": 4}, "n_buckets"),
        ("PosSASRec", {"loss_type": "CE", "mix_x": True}, "mix_x"),
        ("PosSASRec", {"loss_type": "SCEE"}, "loss_type"),
        ("SASRec", {"loss_type": "SCE"}, "loss_type"),
        ("BPR", {"loss_type": "SCE"}, "loss_type"),
        ("FPARec", {"loss_type": "SCE", "bucket_size": 1}, "bucket_size_"),
        ("PosSASRec", {"loss_type": "in_batch", "negatives": 5}, "negatives"),
        ("PosSASRec", {"loss_type": "BCE", "logq_correction": "none"}, "logq_correction"),
        ("PosSASRec", {"loss_type": "gBCE", "negative_sampler": "popularity"}, "negative_sampler"),
        ("PosSASRec", {"loss_type": "gBCE", "gbce_t": 1.5}, "gbce_t"),
        ("PosSASRec", {"loss_type": "BCE", "negatives": 0}, "negatives"),
        ("GRU4Rec", {"loss_type": "gBCE"}, "loss_type"),
        ("GRU4Rec", {"augmentation": "all_positions", "target_window": 3}, "target_window"),
        ("AttrFormer", {"target_window": 3}, "target_window.*future_weights"),
        ("PosSASRec", {"augmentation": "prefix", "target_window": 3}, "target_window"),
        (
            "PosSASRec",
            {"loss_type": "sampled_softmax", "logq_correction": "standard"},
            "negative_sampler: uniform",
        ),
        (
            "FPARec",
            {"loss_type": "SCE", "train_neg_sample_args": {"distribution": "uniform"}},
            "SCE",
        ),
    ],
    ids=str,
)
def test_wrong_options_are_refused(model: str, options: dict, field: str) -> None:
    with pytest.raises(UsageError, match=field):
        PosConfig(model, "ml-100k", None, options)
