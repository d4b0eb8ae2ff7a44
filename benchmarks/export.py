"""How long one request takes: the model as it is evaluated, and its exported programs.

    python benchmarks/export.py [--requests 300]

A request is one history of full length to the 100 best of all items of ml-100k. Weights are fresh,
which takes as long as trained ones; sizes are the defaults of each model. One CPU thread. Writes
the table of docs/export.md.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from page import DOCS, in_turns, machine, replace_section, show_percentiles, table, time_call
from training import build

from recbole_pos.model.models import MODELS
from recbole_pos.serve.export import load_program
from recbole_pos.serve.programs import Encoder, Recommend, make_encoder, trace, write_onnx

EXPORTED = [name for name in MODELS if name not in ("PosRec", "AttrFormer")]
K, LENGTH = 100, 50
WARM = 20  # requests before those that are timed


def time_requests(sides: list[Callable[[], Any]], requests: int) -> list[str]:
    """Return median and 99th percentile of a request to each side in ms; they take turns."""
    runs = in_turns(sides, WARM + requests, time_call)
    return [show_percentiles(of_side[WARM:], 2) for of_side in runs.values()]


def eager(encoder: Encoder, given: dict[str, torch.Tensor]) -> Callable[[], Any]:
    """Return a request to the model itself."""
    model, allowed = encoder.model, torch.ones(1, encoder.model.n_items, dtype=torch.bool)
    allowed[:, 0] = False

    def request() -> Any:
        scores = model(*given.values()) @ model.item_embedding.weight.t()
        return scores.masked_fill(~allowed, -torch.inf).topk(K)

    return request


def measure(name: str, folder: Path, requests: int) -> list[str]:
    """Return the row of a model."""
    experiment = build(name, "ml-100k", MAX_ITEM_LIST_LENGTH=LENGTH)
    encoder = make_encoder(experiment.model.eval())
    module = Recommend(encoder, K)
    given = encoder.random_inputs(torch.tensor([LENGTH]), torch.Generator().manual_seed(0))
    inputs = {**given, "allowed": torch.ones(1, encoder.model.n_items, dtype=torch.bool)}
    inputs = {name: inputs[name] for name in module.inputs}
    program = trace(module)
    torch.export.save(program, folder / f"{name}.pt2")
    write_onnx(program, folder / f"{name}.onnx", module.inputs, ("best", "scores"))
    sides = [eager(encoder, given)]
    for suffix in ("pt2", "onnx"):
        run = load_program(folder / f"{name}.{suffix}")
        sides.append(lambda run=run: run(inputs))
    return [name, *time_requests(sides, requests)]


def main() -> None:
    """Measure every model and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=300)
    requests = parser.parse_args().requests
    torch.set_num_threads(1)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        rows = [measure(name, Path(folder), requests) for name in EXPORTED]
    note = (
        f"Median / 99th percentile of {requests} requests, in milliseconds, sides in turn: "
        f"one history of {LENGTH} interactions to the {K} best of the 1,682 items of ml-100k, "
        f"default sizes, {machine()}; written by `make bench-export`."
    )
    text = table(("model", "eager", "torch_export", "onnx"), rows)
    replace_section(DOCS / "export.md", "latency", f"{text}\n\n{note}")


if __name__ == "__main__":
    main()
