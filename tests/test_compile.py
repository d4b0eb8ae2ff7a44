"""``compile: True``: a training step is one graph, for all sizes of batches, and the same loss."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from recbole_pos.layers import large_products

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attn_dropout_prob": 0.0}


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
    loss = trainer.adapter.choose_loss(packed=True)

    def forward(batch: Any) -> torch.Tensor:
        with trainer.precision.autocast():
            return loss(batch)

    trainer.model.train()
    found = torch._dynamo.explain(forward)(batch)
    assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons


def test_it_learns_the_same_with_a_graph_for_all_sizes(experiment, monkeypatch) -> None:
    """Loss and gradients of batches of other numbers of events, sequences and columns."""
    monkeypatch.setitem(large_products.CHUNK_ELEMENTS, "cpu", 64)
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


def test_the_option_compiles_once(experiment, monkeypatch) -> None:
    compiler = Mock(side_effect=lambda function, dynamic: function)
    monkeypatch.setattr(torch, "compile", compiler)
    trainer = (one := experiment("FPARec", compile=True)).trainer
    for epoch in range(2):
        trainer._train_epoch(trainer.training_loader(one.loaders["train"]), epoch)
    compiler.assert_called_once_with(one.model.window_loss, dynamic=True)
