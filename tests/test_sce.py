"""Scalable cross-entropy: loops, exactness, what may be a candidate, memory, options."""

from __future__ import annotations

import functools
import inspect
import math
from pathlib import Path

import pytest
import reference
import torch
from conftest import CROSS_ENTROPY
from recbole.data.interaction import Interaction

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.batch import SequenceBatch
from recbole_pos.errors import UsageError
from recbole_pos.layers import chunks, losses, sce
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
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    return list(found)


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
    grad, _ = compare(got, want, hidden, weight)
    outside = [i for i in range(len(targets)) if i not in covered]
    assert (grad[outside] == 0).all()


@pytest.mark.parametrize("mix_x", [True, False])
@pytest.mark.parametrize("n_buckets", [1, 4])
def test_sce_is_exact_when_buckets_hold_everything(n_buckets: int, mix_x: bool) -> None:
    hidden, weight, targets, _ = example(m=150)
    options = {"n_buckets": n_buckets, "bucket_size_x": 150, "bucket_size_y": 22, "mix_x": mix_x}
    got = sce.scalable_cross_entropy(hidden, weight, targets, **options)
    compare(got, losses.full_cross_entropy(hidden, weight, targets), hidden, weight)


def test_sce_of_one_position_by_hand() -> None:
    """The largest of its buckets counts; its own target in a bucket does not count twice."""
    hidden = torch.tensor([[1.0, 1.0]], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[9.0, 9.0], [3.0, 0.0], [0.0, 2.0], [1.0, 0.5]], dtype=torch.float64)
    buckets = torch.eye(2, dtype=torch.float64)  # of the items, one takes {1, 3}, one {2, 3}
    loss = sce.bucket_cross_entropy(hidden, weight, torch.tensor([3]), buckets, 1, 2)
    # the target's logit is 1.5; against it stand 3 in the first bucket and 2 in the second
    assert loss.item() == pytest.approx(math.log(math.exp(1.5) + math.exp(3)) - 1.5)
    alone = sce.bucket_cross_entropy(hidden, weight, torch.tensor([1]), buckets[:1], 1, 1)
    assert alone.item() == 0  # nothing but the target in its bucket
    assert (torch.autograd.grad(alone, hidden)[0] == 0).all()


@pytest.mark.parametrize("frozen", [0, 1])
def test_only_the_gradient_that_is_asked_for(frozen: int) -> None:
    inputs, (targets, buckets) = list(example()[:2]), example()[2:]
    loss = sce.bucket_cross_entropy(*inputs, targets, buckets, 9, 4)
    want = torch.autograd.grad(3 * loss, inputs)[1 - frozen]
    inputs[frozen] = inputs[frozen].detach()
    loss = sce.bucket_cross_entropy(*inputs, targets, buckets, 9, 4)
    assert torch.equal(torch.autograd.grad(3 * loss, inputs[1 - frozen])[0], want)


def test_padding_is_never_a_candidate() -> None:
    """Not even when its product is the largest by far."""
    hidden, weight, targets, buckets = example()
    want = sce.bucket_cross_entropy(hidden, weight, targets, buckets, 9, 4)
    with torch.no_grad():
        weight[0] = 100 * buckets[0]
    got = sce.bucket_cross_entropy(hidden, weight, targets, buckets, 9, 4)
    assert torch.equal(got, want)
    assert (torch.autograd.grad(got, weight)[0][0] == 0).all()


def test_ties() -> None:
    """Equal rows and equal buckets: as many are taken as asked for, gradients are shared."""
    hidden, weight, targets, buckets = example()
    twice = torch.cat([buckets, buckets])
    once = sce.bucket_cross_entropy(hidden, weight, targets, buckets, 9, 4)
    got = sce.bucket_cross_entropy(hidden, weight, targets, twice, 9, 4)
    compare(got, once, hidden, weight)
    index = sce.largest_products(buckets, torch.ones(100, 6, dtype=torch.float64), 7)
    assert all(len(set(row)) == 7 for row in index.tolist())


@pytest.mark.parametrize("order", ["random", "rising", "falling", "equal"])
@pytest.mark.parametrize("k", [1, 7, 300, 5000, 6000])
@pytest.mark.parametrize("chunk", [64, 1000, 5000, 2**20])
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
    got = products.gather(1, index).sort(1, descending=True).values
    assert torch.equal(got, want)
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


def test_sce_survives_large_logits() -> None:
    """Float32 logits of +-1000: the probability of the target underflows, the loss must not."""
    hidden = torch.tensor([[1000.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    loss = sce.scalable_cross_entropy(hidden, weight, torch.tensor([2]), **PAPER)
    assert loss.item() == 2000
    loss.backward()
    assert hidden.grad.isfinite().all()


def test_sce_under_autocast() -> None:
    hidden, weight, targets, _ = (t.detach() for t in example())
    hidden, weight = hidden.bfloat16(), weight.float()
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = sce.scalable_cross_entropy(hidden, weight, targets, **PAPER)
    torch.manual_seed(1)
    want = sce.scalable_cross_entropy(hidden.float(), weight, targets, **PAPER)
    assert loss.dtype == torch.float32 and torch.equal(loss, want)


def test_sce_holds_neither_positions_nor_buckets_by_items() -> None:
    """Nothing allocated is larger than the gradient of the item vectors."""
    m, items, d = 1024, 200_000, 4
    hidden = torch.randn(m, d, requires_grad=True)
    weight = torch.randn(items, d, requires_grad=True)
    options = {**PAPER, "n_buckets": 128, "bucket_size_x": 128, "bucket_size_y": 512}
    with torch.profiler.profile(profile_memory=True) as profile:
        targets = torch.randint(1, items, (m,))
        sce.scalable_cross_entropy(hidden, weight, targets, **options).backward()
    sizes = sorted(event.cpu_memory_usage for event in profile.events())
    catalogue, chunk = items * d * 4, 4 * chunks.CHUNK_ELEMENTS["cpu"]
    logits = 128 * 128 * 512 * 4
    assert sizes[-1] <= max(catalogue, 2 * chunk) < logits / 2 < 128 * items * 4 / 4


def test_same_seed_same_loss() -> None:
    hidden, weight, targets, _ = example(m=200, items=500)
    options = {**PAPER, "bucket_size_y": 5}
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(sce.scalable_cross_entropy(hidden, weight, targets, **options).item())
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("mix_x", [True, False])
def test_recommended_sizes_and_directions(monkeypatch, mix_x: bool) -> None:
    """2 sqrt(m) rounded up where nothing is given; mixtures lie in the span of the positions."""
    seen = []
    monkeypatch.setattr(sce, "bucket_cross_entropy", lambda *given: seen.append(given))
    _, weight, targets, _ = example(m=30)
    hidden = torch.zeros(30, 6, dtype=torch.float64)
    hidden[:, 2] = torch.randn(30)
    options = {**PAPER, "mix_x": mix_x}
    sce.scalable_cross_entropy(hidden, weight, targets, **options)
    sce.scalable_cross_entropy(
        hidden, weight, targets, **{**options, "n_buckets": 3, "bucket_size_x": 4}
    )
    buckets = seen[0][3]
    assert buckets.shape == (11, 6) and seen[0][4:] == (11, 256)
    assert seen[1][3].shape == (3, 6) and seen[1][4:] == (4, 256)
    assert ((buckets != 0).sum(0).bool().tolist() == [False] * 2 + [True] + [False] * 3) == mix_x


def test_training_lowers_the_loss(experiment) -> None:
    """And most of what full cross-entropy measures, which SCE stands for."""
    made = experiment(
        "PosSASRec", loss_type="SCE", bucket_size_y=30, epochs=30, learning_rate=0.02, eval_step=0
    )
    model, loader = made.model, made.trainer.training_loader(made.loaders["train"])
    assert model.loss.func is sce.scalable_cross_entropy

    def full() -> float:
        sampled, model.loss = model.loss, losses.full_cross_entropy
        model.eval()
        found = sum(model.window_loss(b).item() * len(b) for b in loader) / loader.targets
        model.loss = sampled
        return found

    before = full()
    made.trainer.fit(made.loaders["train"], None, saved=False, verbose=False)
    history = [line["loss"] for line in made.trainer.progress.history]
    assert history[-1] < 0.9 * history[0]
    assert full() < 0.95 * before


def test_every_model_and_batch_format_takes_the_loss(experiment) -> None:
    for model in recbole_pos.model.models.MODELS:
        plain = CROSS_ENTROPY.get(model, {})
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
        ours, theirs = ((m.window_loss, m.calculate_loss) for m in (made.model, exact))
        for batch, loss, full in zip((packed, rows), ours, theirs, strict=True):
            torch.testing.assert_close(loss(batch), full(batch))
        made.model.loss = functools.partial(made.model.loss.func, **{**PAPER, "bucket_size_y": 1})
        for batch, loss, full in zip((packed, rows), ours, theirs, strict=True):
            assert loss(batch) < 0.5 * full(batch)


def test_a_resumed_run_ends_with_the_same_bits(tiny: Path, tmp_path: Path) -> None:
    """The directions come from the random state that checkpoints keep."""
    options = {
        "data_path": str(tiny),
        "hidden_size": 8,
        "inner_size": 8,
        "loss_type": "SCE",
        "bucket_size_y": 4,
        "show_progress": False,
    }
    for name, first in (("whole", 3), ("parts", 1)):
        given = {**options, "epochs": first}
        folder = str(tmp_path / name)
        recbole_pos.run("PosSASRec", "tiny", config_dict=given, run_dir=folder, verbose=False)
    recbole_pos.run(resume=str(tmp_path / "parts"), config_dict={"epochs": 3}, verbose=False)
    one, two = (recbole_pos.load(tmp_path / name).model for name in ("whole", "parts"))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)


def test_recboles_own_entry_takes_the_loss(tiny: Path) -> None:
    from recbole.config import Config

    config = Config("FPARec", "tiny", config_dict={"loss_type": "SCE", "data_path": str(tiny)})
    assert config["bucket_size_y"] == 256 and config["n_buckets"] is None


def test_the_yaml_has_the_options_of_the_loss() -> None:
    parameters = inspect.signature(sce.scalable_cross_entropy).parameters.values()
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert set(read_yaml(ROOT / "loss" / "SCE.yaml")) == keywords
    assert {p.stem for p in (ROOT / "loss").iterdir()} == {"SCE"}


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("PosSASRec", {"n_buckets": 4}, "unknown key 'n_buckets'"),
        ("PosSASRec", {"loss_type": "CE", "mix_x": True}, "unknown key 'mix_x'"),
        ("PosSASRec", {"loss_type": "SCEE"}, "'SCEE' is not one of CE, SCE for this model"),
        ("PosSASRec", {"loss_type": ["SCE"]}, "loss_type: expected text"),
        ("PosSASRec", {"loss_type": None}, "loss_type: None is not one of CE, SCE"),
        ("SASRec", {"loss_type": "SCE"}, "'SCE' is not one of CE, BPR for this model"),
        ("BPR", {"loss_type": "SCE"}, "unknown key 'loss_type'"),
        ("FPARec", {"loss_type": "SCE", "n_buckets": 0}, "n_buckets must be at least 1"),
        ("FPARec", {"loss_type": "SCE", "n_buckets": 2.5}, "n_buckets: expected a whole number"),
        ("FPARec", {"loss_type": "SCE", "bucket_size_x": -1}, "bucket_size_x must be at least 1"),
        ("FPARec", {"loss_type": "SCE", "bucket_size_x": "a"}, "bucket_size_x: expected a whole"),
        ("FPARec", {"loss_type": "SCE", "bucket_size_y": 0}, "bucket_size_y must be at least 1"),
        ("FPARec", {"loss_type": "SCE", "bucket_size_y": None}, "bucket_size_y: expected a whole"),
        ("FPARec", {"loss_type": "SCE", "mix_x": 1}, "mix_x: expected true or false"),
        ("FPARec", {"loss_type": "SCE", "bucket_size": 1}, "nearest known: bucket_size_"),
        (
            "FPARec",
            {"loss_type": "SCE", "train_neg_sample_args": {"distribution": "uniform"}},
            "SCE chooses items itself",
        ),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_wrong_options_are_refused(model: str, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PosConfig(model, "ml-100k", None, options)


def test_empty_sizes_may_be_given() -> None:
    options = {"loss_type": "SCE", "n_buckets": None, "bucket_size_x": 7}
    config = PosConfig("FPARec", "ml-100k", None, options)
    assert config["n_buckets"] is None and config["bucket_size_x"] == 7
    again = PosConfig(None, None, None, config.plain)
    assert again.plain == config.plain
