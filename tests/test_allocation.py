"""What does not fit into memory is refused before it is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.experiment import allocation, evaluating
from recbole_pos.experiment.allocation import Allocations, memory
from recbole_pos.experiment.build import prepare


@pytest.mark.parametrize(
    ("model", "options", "named"),
    [
        ("PosSASRec", {"hidden_size": 65_536}, "hidden_size 65,536"),
        ("SASRec", {"inner_size": 65_536, "n_layers": 1000}, "n_layers 1,000"),
        ("FPARec", {"MAX_ITEM_LIST_LENGTH": 16_384, "positional_rank": 65_536}, "positional_rank"),
        ("GRU4Rec", {"hidden_size": 65_536}, "hidden_size 65,536"),
        ("FEARec", {"train_batch_size": 10**6}, "train_batch_size 1,000,000"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_cannot_fit_is_refused_before_it_is_there(
    tiny: Path, monkeypatch: Any, model: str, options: dict, named: str
) -> None:
    monkeypatch.setattr(allocation, "memory", lambda: 2**28)
    largest = 0
    zeros = torch.Tensor.normal_

    def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, tensor.nbytes)
        return zeros(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "normal_", noted)
    config = PosConfig(model, "tiny", None, {"data_path": str(tiny), **options})
    with pytest.raises(UsageError, match=f"{model} needs .* GiB or more.*Large here are .*{named}"):
        prepare(config)
    assert largest <= 2**28


def test_scores_of_a_batch_must_fit(tiny: Path, monkeypatch: Any) -> None:
    """Of all items; of a part of them where a model is evaluated part by part."""
    configs = {
        model: PosConfig(model, "tiny", None, {"data_path": str(tiny), "eval_batch_size": 50})
        for model in ("Pop", "FPARec")
    }
    made = {model: prepare(config) for model, config in configs.items()}
    monkeypatch.setattr(evaluating, "PART", 10)
    assert [made[model].trainer.part for model in configs] == [None, 10]
    monkeypatch.setattr(Allocations, "_refuse_above", lambda *_: None)  # of weights
    monkeypatch.setattr(allocation, "memory", lambda: 1000)
    for model, items in (("Pop", 41), ("FPARec", 10)):
        with pytest.raises(
            UsageError, match=f"eval_batch_size: .* rows of scores for {items} items"
        ):
            prepare(configs[model])


def test_memory_is_that_of_the_process(monkeypatch: Any) -> None:
    """The limit of the shell counts, where there is one."""
    import resource

    assert 2**28 < memory() < 2**50
    monkeypatch.setattr(resource, "getrlimit", lambda what: (12_345, resource.RLIM_INFINITY))
    assert memory() == 12_345


def test_models_are_built_as_without_the_guard(tiny: Path) -> None:
    """It watches, and changes nothing."""
    config = PosConfig("SASRec", "tiny", None, {"data_path": str(tiny)})
    made = prepare(config)
    torch.manual_seed(0)
    plain = config.model_class(config, made.loaders["train"]._dataset).state_dict()
    torch.manual_seed(0)
    with Allocations(config, made.dataset) as seen:
        watched = config.model_class(config, made.loaders["train"]._dataset)
    assert all(torch.equal(watched.state_dict()[name], plain[name]) for name in plain)
    counted, weights = seen.bytes, 16 * sum(p.numel() for p in watched.parameters())  # with Adam
    assert weights <= counted < 2 * weights  # RecBole copies a layer and throws it away
    torch.nn.Linear(2, 2)
    assert seen.bytes == counted
