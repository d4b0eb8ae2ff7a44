"""What does not fit into memory is refused; what is freed goes back to the system."""

from __future__ import annotations

import platform
import resource
import sys
from pathlib import Path

import pytest

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.experiment import build, evaluation, memory
from recbole_pos.experiment.build import prepare


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse by themselves")
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("PosSASRec", {"hidden_size": 65_536}),
        ("SASRec", {"inner_size": 65_536, "n_layers": 1000}),
        ("FPARec", {"MAX_ITEM_LIST_LENGTH": 16_384, "positional_rank": 65_536}),
    ],
    ids=str,
)
def test_weights_that_cannot_fit(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, model: str, options: dict
) -> None:
    """Refused before the memory is used, as they are made or with their gradients."""
    monkeypatch.setattr(memory, "free_memory", lambda: 2**28)
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    config = PosConfig(model, "tiny", None, {"data_path": str(tiny), **options})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UsageError, match=f"{model}: .* memory, for 41 items"):
        prepare(config)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB
    assert resource.getrlimit(resource.RLIMIT_DATA) == limits
    monkeypatch.setattr(build, "memory", lambda: 2**10)
    with pytest.raises(UsageError, match=f"{model}: .* memory"):
        prepare(PosConfig(model, "tiny", None, {"data_path": str(tiny)}))


def test_scores_of_a_batch_must_fit(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all items; of a part of them where a model is evaluated part by part."""
    configs = {
        model: PosConfig(model, "tiny", None, {"data_path": str(tiny), "eval_batch_size": 50})
        for model in ("Pop", "FPARec")
    }
    made = {model: prepare(config) for model, config in configs.items()}
    monkeypatch.setattr(evaluation, "PART", 10)
    assert [made[model].trainer.part for model in configs] == [None, 10]
    monkeypatch.setattr(memory, "memory", lambda: 1000)
    for model, items in (("Pop", 41), ("FPARec", 10)):
        with pytest.raises(UsageError, match=f"eval_batch_size: .* for {items} items"):
            prepare(configs[model])


def test_memory_is_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of the shell counts, where there is one."""
    assert 2**28 < memory.memory() < 2**50
    monkeypatch.setattr(resource, "getrlimit", lambda what: (12_345, resource.RLIM_INFINITY))
    assert memory.memory() == 12_345


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such call")
def test_gaps_of_the_heap_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    blocks = [bytearray(100_000) for _ in range(1000)]
    del blocks[::2]
    before = resident()
    memory.give_back()
    assert resident() < before - 20e6 and len(blocks) == 500
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())  # other C libraries do without
    memory.give_back()
