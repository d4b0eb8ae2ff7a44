"""Exported programs against the models: histories of sizes that they were not made with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recbole.data.interaction import Interaction
from schemes import shake
from shop import open_shop, tables, write

from recbole_pos.data.windows import TARGET_EVENT
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import Experiment
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.padded import PaddedContext
from recbole_pos.model.models import MODELS
from recbole_pos.position.schemes import FACTS
from recbole_pos.serve.export import load_program, random_histories
from recbole_pos.serve.programs import (
    Encoder,
    Recommend,
    make_encoder,
    trace,
    write_onnx,
)

Build = Callable[..., Experiment]
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
FORMATS = ["onnx", "torch_export"]
long = pytest.mark.long  # seconds each; one of a kind is in make test
N = 12
LENGTHS = [[N], [1], [5], [1, 1, 1], [3, 1, 7, 7], [1, N, 2, 6, N, 1]]
# everything that can share a layer, then what replaces attention
TOGETHER = (
    "learned sinusoidal time_learned rope time_rope to_rope calendar_rope rote siren_rope alibi"
)
TOGETHER += " semi_local t5 kerple hstu time_decay cape difsr"
ALONE = (
    "kernel channels fuxi_linear tisas parec fparec average linear_annealing exponential_annealing"
)
EXPORTED = [TOGETHER.split(), *([name] for name in ALONE.split())]
EXPORTED += [["linear_attention"], ["token_mixing"]]


def shaken(experiment: Experiment) -> Any:
    """A model whose parameters are far from where they start."""
    torch.manual_seed(0)
    shake(experiment.model.requires_grad_(False))
    return experiment.model.eval()


def model_of(build: Build, position: list[str], **options: Any) -> Any:
    fields = {"difsr_fields": []} if "difsr" in position else {}
    given = {"position": position, "n_heads": 2, "n_layers": 1, **fields, **options}
    return shaken(build("PosSASRec", **given))


def written(module: Encoder | Recommend, form: str, folder: Path) -> Callable[..., list[Any]]:
    """A program by way of its file."""
    program = trace(module)
    path = folder / {"onnx": "program.onnx", "torch_export": "program.pt2"}[form]
    if form == "onnx":
        pytest.importorskip("onnxruntime")
        outputs = ("vector",) if isinstance(module, Encoder) else ("best", "scores")
        write_onnx(program, path, module.inputs, outputs)
    else:
        torch.export.save(program, path)
    return load_program(path)


def batches(encoder: Encoder) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)
    return [random_histories(encoder, torch.tensor(lengths), draw) for lengths in LENGTHS]


def check(encoder: Encoder, program: Callable[..., list[Any]]) -> None:
    for given in batches(encoder):
        expected = encoder.model(*given.values()).detach()  # packed, as in training and evaluation
        torch.testing.assert_close(program(given)[0], expected, **CLOSE)


def test_every_scheme_is_exported() -> None:
    additive = {name for name, printed in FACTS.items() if printed.place in ("input", "none")}
    assert set(FACTS) == {name for group in EXPORTED for name in group} | additive


@pytest.mark.parametrize("block", ["transformer", "hstu"])
@pytest.mark.parametrize("name", FACTS)
def test_rows_with_padding_are_what_packed_events_are(
    experiment: Build, name: str, block: str
) -> None:
    try:
        model = model_of(experiment, [name], block=block)
    except UsageError as error:
        assert "replaces attention" in str(error)
        return
    encoder = make_encoder(model)
    check(encoder, lambda given: [encoder(*given.values())])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("position", "form"),
    [
        pytest.param(names, form, marks=long if form == "onnx" or n else ())
        for n, names in enumerate(EXPORTED)
        for form in FORMATS
    ],
    ids=lambda given: given if isinstance(given, str) else given[-1],
)
def test_programs_of_schemes(
    experiment: Build, tmp_path: Path, position: list[str], form: str
) -> None:
    encoder = make_encoder(model_of(experiment, position))
    check(encoder, written(encoder, form, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "form"),
    [
        pytest.param(name, form, marks=() if (name, form) == ("PosRec", "torch_export") else long)
        for name in ["FGNN", *MODELS]
        for form in FORMATS
        if name != "AttrFormer"
    ],
)
def test_programs_of_models(experiment: Build, tmp_path: Path, model: str, form: str) -> None:
    made = experiment(model)
    # FGNN has no norm: far from its start its states are of size 100
    encoder = make_encoder(made.model.eval() if model == "FGNN" else shaken(made))
    check(encoder, written(encoder, form, tmp_path))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("PosSASRec", {"position": ["learned", "hstu"], "block": "hstu", "n_layers": 1}),
        ("PosSASRec", {"position": ["linear_attention"], "MAX_ITEM_LIST_LENGTH": 150}),
        ("KernelAttention", {"kernel_u": "full", "MAX_ITEM_LIST_LENGTH": 150}),
        ("KernelAttention", {"kernel_band": 3}),
        ("PosSASRec", {"position": ["cape"], "cape_positions": 4}),
        ("PARec", {"positional_mask": "after_softmax", "n_heads": 2}),
        ("TORoPE", {"fusion": "split_head", "n_heads": 2, "timestamp_unit": "milliseconds"}),
        ("PosRec", {"anchor_self_weight": 0.5, "messages": "mean", "anchor_overlap": "sum"}),
        ("PosRec", {"anchors": False, "graph_layers": 2, "n_layers": 2}),
        ("PosSASRec", {"MAX_ITEM_LIST_LENGTH": 2}),
        ("PosSASRec", {"position": ["hstu"], "request_time": "target", "n_layers": 1}),
    ],
)
def test_programs_of_options(
    experiment: Build, tmp_path: Path, model: str, options: dict[str, Any]
) -> None:
    encoder = make_encoder(shaken(experiment(model, **options)))
    program = written(encoder, "onnx", tmp_path)
    n, draw = encoder.model.max_seq_length, torch.Generator().manual_seed(1)
    for lengths in ([n], [n, 1, n // 2, max(n - 9, 1)]):
        given = random_histories(encoder, torch.tensor(lengths), draw)
        torch.testing.assert_close(program(given)[0], encoder.model(*given.values()), **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("form", [pytest.param("onnx", marks=long), "torch_export"])
def test_the_best_of_the_allowed(experiment: Build, tmp_path: Path, form: str) -> None:
    encoder = make_encoder(shaken(experiment("PosSASRec")))
    k, items = 6, encoder.model.n_items
    program = written(Recommend(encoder, k), form, tmp_path)
    draw = torch.Generator().manual_seed(2)
    for given in batches(encoder):
        scores = encoder.model(*given.values()) @ encoder.model.item_embedding.weight.t()
        for rows in {1, len(scores)}:
            allowed = torch.rand(rows, items, generator=draw) < 0.5
            allowed[-1, 3:] = False  # item 0, which is padding, and at most two more
            wanted = scores.masked_fill(~allowed, -torch.inf)
            wanted[:, 0] = -torch.inf
            best, ids = wanted.topk(k)
            found, found_scores = program({**given, "allowed": allowed})
            torch.testing.assert_close(found_scores, best, **CLOSE)
            assert torch.equal(found, ids.masked_fill(best.isinf(), 0))
    if form == "onnx":  # without a mask
        scores[:, 0] = -torch.inf
        torch.testing.assert_close(program(given)[1], scores.topk(k).values, **CLOSE)


@pytest.mark.slow
@pytest.mark.long
def test_onnx_has_equal_scores_by_id(experiment: Build, tmp_path: Path) -> None:
    encoder = make_encoder(shaken(experiment("PosSASRec")))
    with torch.no_grad():
        encoder.model.item_embedding.weight[2:] = 0
    zeros, _ = written(Recommend(encoder, 6), "onnx", tmp_path)(batches(encoder)[-1])
    assert all(x[x > 1].tolist() == list(range(2, 2 + int((x > 1).sum()))) for x in zeros)


@pytest.mark.slow
@pytest.mark.parametrize("reads", ["own", "none"])
@pytest.mark.parametrize("form", ["eager", *(pytest.param(x, marks=long) for x in FORMATS)])
def test_attrformer_relates_a_history(tmp_path: Path, form: str, reads: str) -> None:
    made = tables()
    made["user"]["country:token"] = made["user"]["age:float"] = 1
    relations = [
        *("brand", {"field": "tags", "source": "behaviour"}, "time", "position", "country"),
        *({"field": "price", "within": "brand", "scales": [1.0, 5.0]}, "weight"),
    ]
    options = {"MAX_ITEM_LIST_LENGTH": 9, "relations": relations, "inference_relations": reads}
    shop = open_shop(write(tmp_path, made), **options)
    model, log = shaken(shop), shop.dataset.log
    encoder = make_encoder(model)
    if form == "eager":  # what is traced
        program = lambda given: [encoder(*given.values())]  # noqa: E731
    else:
        program = written(encoder, form, tmp_path)
    target = np.flatnonzero(log.ranks > 0)
    lengths = np.minimum(log.ranks[target], 9)
    rows = Interaction({TARGET_EVENT: target, "item_length": torch.from_numpy(lengths)})
    expected = model.encode_rows(rows)
    width, at = lengths.max(), target - lengths
    events = np.minimum(at[:, None] + np.arange(width), len(log) - 1)
    outside = torch.from_numpy(np.arange(width) >= lengths[:, None])
    items, times = (x[torch.from_numpy(events)] for x in (log.items, log.times))
    given = {
        "items": items.masked_fill(outside, 0),
        "lengths": torch.from_numpy(lengths),
        "times": times.masked_fill(outside, 0),
    }
    found = program({name: given[name] for name in encoder.inputs})[0]
    torch.testing.assert_close(found, expected, **CLOSE)
    if reads == "own":  # which is not nothing
        model.inference = "none"
        assert (model.encode_rows(rows) - expected).abs().max() > 1e-2


def test_attrformer_says_what_it_cannot(tmp_path: Path) -> None:
    folder = write(tmp_path, tables())
    for relations, reads, message in (
        (["brand"], None, "inference_relations: batch: it reads events of other users"),
        (["brand", "channel", {"field": "stars"}], "own", "relations of channel, stars"),
        (["country"], "own", "where some have no attribute"),
    ):
        with pytest.raises(UsageError, match=message):
            make_encoder(open_shop(folder, relations=relations).model, reads)


def test_a_padded_context_answers_as_a_packed_one() -> None:
    lengths = torch.tensor([2, 4, 1])
    real = torch.arange(4) < lengths[:, None]
    rows = torch.arange(12).view(3, 4) + 1
    times = 100.0 * rows.double()
    packed = SequenceContext.from_lengths(lengths, 6, times[real], rows[real])
    padded = PaddedContext.from_rows(rows.masked_fill(~real, 0), lengths, 6, times)
    at = real.view(-1)
    for name in ("row", "index", "age", "elapsed", "items", "follows"):
        assert torch.equal(getattr(padded, name)[at], getattr(packed, name)), name
    x = torch.randn(12, 2)
    for name in ("first", "last"):
        assert torch.equal(x[getattr(padded, name)], x[at][getattr(packed, name)])
    for align in ("start", "end"):
        for time_major in (False, True):
            block = padded.pad(x, align, time_major)
            assert torch.equal(padded.unpad(block, align, time_major)[at], x[at])
            expected = packed.pad(x[at], align, time_major)
            columns = slice(None, 4) if align == "start" else slice(-4, None)
            index = (columns,) if time_major else (slice(None), columns)
            assert torch.equal(block[index], expected)
