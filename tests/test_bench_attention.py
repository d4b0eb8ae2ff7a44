"""The comparison of attention kernels that only a GPU has: what of it a CPU can say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_attention

    yield gpu_attention
    for name in ("gpu_attention", "gpu_data", "gpu_timing"):
        del sys.modules[name]


def case_of(bench: Any, biased: bool) -> Any:
    size = bench.Size(0, 0, 0, length=20, d=128, layers=1, batch=0)
    return bench.make_case(size, 7, biased, torch.device("cpu")).to(torch.float64)


@pytest.mark.parametrize("biased", [False, True])
def test_ours_is_attention_one_sequence_at_a_time(bench: Any, biased: bool) -> None:
    case = case_of(bench, biased)
    found = bench.padded(case)
    begin = 0
    for length in case.ctx.lengths.tolist():
        q, k, v = (x[begin : begin + length] for x in (case.query, case.key, case.value))
        logits = torch.einsum("ihe,jhe->hij", q, k) / q.size(-1) ** 0.5
        if biased:
            logits = logits + case.bias[0, :, :length, :length]
        unseen = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = logits.masked_fill(unseen, -torch.inf).softmax(-1)
        want = torch.einsum("hij,jhe->ihe", weights, v)
        torch.testing.assert_close(found[begin : begin + length], want)
        begin += length


def test_flex_without_a_compiler_gives_what_ours_gives(bench: Any) -> None:
    """Its forward pass; a CPU has no more of it."""
    case = case_of(bench, True)
    with torch.no_grad():
        torch.testing.assert_close(bench.Flex(compiled=False)(case), bench.padded(case))


def test_offsets_are_those_of_packed_sequences(bench: Any) -> None:
    case = case_of(bench, False)
    offsets = bench._offsets(case).tolist()
    assert offsets[0] == 0 and offsets[-1] == len(case.query)
    assert [b - a for a, b in zip(offsets, offsets[1:], strict=False)] == case.ctx.lengths.tolist()


def test_a_kernel_that_is_wrong_or_missing_is_told(bench: Any) -> None:
    """One that looks ahead, and one that this device does not have."""
    case = case_of(bench, False)

    def ahead(case: Any) -> torch.Tensor:
        blocks = bench._blocks(case)
        out = torch.nn.functional.scaled_dot_product_attention(*blocks)
        return case.ctx.unpad(out.transpose(1, 2), "start")

    tried = {"layers": bench.padded, "ahead": ahead, "varlen": bench.varlen}
    ours, wrong, missing = bench.compared(case, tried)
    assert (ours[0], ours[-1], wrong[-1]) == ("layers", "yes", "NO")
    assert missing[0] == "varlen" and missing[-1].startswith("fails: ")
    assert len(ours) == len(wrong) == len(missing) == len(bench.HEAD) - 2
