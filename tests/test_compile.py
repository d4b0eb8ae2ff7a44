"""``compile: True``: a training step is one graph, for all sizes of batches, and the same loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from recbole_pos.errors import UsageError
from recbole_pos.layers import chunks, losses

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attn_dropout_prob": 0.0}
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("PosSASRec", {"position": ["t5"], "attn_dropout_prob": 0.2, "precision": "bf16"}),
        ("FPARec", {"train_windows": "sliding"}),
        pytest.param("KernelAttention", {}, marks=pytest.mark.long),
        pytest.param("TORoPE", {}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_step_is_one_graph(experiment, model: str, options: dict[str, Any]) -> None:
    trainer = (made := experiment(model, n_layers=1, **options)).trainer
    batch = next(iter(trainer.training_loader(made.loaders["train"])))
    loss = trainer.adapter.loss(packed=True)

    def forward(batch: Any) -> torch.Tensor:
        with trainer.precision.forward():
            return loss(batch)

    trainer.model.train()
    found = torch._dynamo.explain(forward)(batch)
    assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons


def test_it_learns_the_same_with_a_graph_for_all_sizes(experiment, monkeypatch) -> None:
    """Loss and gradients of batches of other numbers of events, sequences and columns."""
    monkeypatch.setitem(chunks.CHUNK_ELEMENTS, "cpu", 64)
    made = experiment("PosSASRec", n_layers=1, train_batch_size=8, **NO_DROPOUT)
    model, trainer = made.model, made.trainer
    model.train()
    batches = list(trainer.training_loader(made.loaders["train"]))
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(model.window_loss, dynamic=True, backend=graphs)
    for batch in batches:
        found = []
        for loss in (compiled, model.window_loss):
            value = 3 * loss(batch)
            found.append((value, *torch.autograd.grad(value, list(model.parameters()))))
        torch.testing.assert_close(*found)
    assert len({(len(batch.items), batch.width) for batch in batches}) > 4
    assert sum(len(graph.graph.nodes) > 0 for graph in graphs.graphs) <= 2  # full blocks or not


@pytest.mark.parametrize(
    ("model", "options"),
    [
        *((name, {}) for name in ("PosRec", "AttrFormer", "SASRec")),
        ("FPARec", {"augmentation": "prefix"}),
        ("FPARec", {"loss_type": "SCE"}),
        ("FPARec", {"target_window": 2}),
    ],
    ids=str,
)
def test_what_has_no_graph_is_refused(experiment, model: str, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"^compile: {model}"):
        experiment(model, compile=True, **options)


def test_the_option_compiles_once(experiment, monkeypatch) -> None:
    made = []

    def compiler(function: Any, dynamic: bool) -> Any:
        assert dynamic
        made.append(function)
        return function

    monkeypatch.setattr(torch, "compile", compiler)
    trainer = (one := experiment("FPARec", compile=True)).trainer
    for epoch in range(2):
        trainer._train_epoch(trainer.training_loader(one.loaders["train"]), epoch)
    assert made == [one.model.window_loss]


@pytest.mark.parametrize("kind", [None, torch.bfloat16])
def test_the_loss_as_one_operation(kind: torch.dtype | None) -> None:
    """What a graph holds of it: shapes, gradients, and that it writes to none of its inputs."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 4, requires_grad=True) for n in (7, 5))
    targets, betas = torch.randint(1, 5, (7, 2)), torch.rand(7, 2)
    given = hidden, weight, targets, betas, None, kind
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(losses._compiled_loss, given, test_utils=tests)
    found = torch.autograd.grad(3 * losses._compiled_loss(*given)[0], (hidden, weight))
    want = torch.autograd.grad(3 * losses._CatalogueLoss.apply(*given), (hidden, weight))
    for one, other in zip(found, want, strict=True):
        assert torch.equal(one, other)
