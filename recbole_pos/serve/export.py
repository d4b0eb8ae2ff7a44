"""A trained model as files that need neither RecBole nor this package."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from torch import Tensor

from recbole_pos.data.protocols import Dataset
from recbole_pos.errors import UsageError
from recbole_pos.experiment.run import NeedsDataset, load, load_without_data
from recbole_pos.files import name_write_errors, replace_folder
from recbole_pos.model.models import registered_name
from recbole_pos.serve.programs import (
    Encoder,
    Recommend,
    make_encoder,
    require_onnx,
    trace,
    write_onnx,
)
from recbole_pos.values import SECONDS, Options, check_choice, is_whole, shown
from recbole_pos.version import __version__

FORMATS = ("onnx", "torch_export")
SUFFIX = {"onnx": "onnx", "torch_export": "pt2"}
TOLERANCE = 1e-4  # difference of a program from the model, relative to the largest entry

Program = Callable[[dict[str, Tensor]], list[Tensor]]


def export(
    run_dir: str | Path,
    to: str | Path,
    format: str = "onnx",
    k: int = 100,
    inference_relations: str | None = None,
    data_path: str | Path | None = None,
) -> Path:
    """Write a trained model into a folder, from which it is served without this package.

    ``vector`` gives the vector of a history, ``recommend`` the k best items and their scores, of
    those allowed. Beside them are names and vectors of items, and a README that uses them all.

    Args:
        run_dir: the folder of a run, finished or not; its best weights are used.
        to: a folder that is new or empty.
        format: ``onnx`` or ``torch_export``.
        k: number of items to recommend; all items if there are fewer.
        inference_relations: for AttrFormer, ``own`` or ``none`` instead of the value it was
            trained with.
        data_path: the folder that holds the folder of the dataset, which only some models need;
            where the run found it if None.

    Returns:
        The folder; it appears once all of its files are written.

    Raises:
        UsageError: if the model cannot be exported, or the folder is in use.
        StorageError: if something cannot be written.
    """
    check_choice("format", format, FORMATS)
    if not (is_whole(k) and k > 0):
        raise UsageError(f"k: expected the number of items to recommend, found {shown(k)}")
    if format == "onnx":
        require_onnx()
    folder = Path(to)
    with name_write_errors(folder):
        if os.path.exists(folder) and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"--to {folder} is in use; name a folder that is new or empty")
    with replace_folder(folder) as unfinished:
        try:
            experiment = load_without_data(run_dir)
        except NeedsDataset:
            experiment = load(run_dir, data_path=data_path)
        encoder = make_encoder(experiment.model, inference_relations)
        with name_write_errors(folder):
            _write(encoder, experiment.dataset, unfinished, format, k)
    return folder


def _write(encoder: Encoder, dataset: Dataset, folder: Path, format: str, k: int) -> None:
    """Write the programs, names and vectors of items, values of fields, and README of a model.

    Raises:
        UsageError: if a program cannot be made, or differs from the model.
    """
    names: list[Any] = [None, *dataset.field2id_token[dataset.iid_field][1:].tolist()]
    top = Recommend(encoder, min(k, len(names) - 1))
    for name, module, outputs in (
        ("vector", encoder, ("vector",)),
        ("recommend", top, ("best", "scores")),
    ):
        program, path = trace(module), folder / f"{name}.{SUFFIX[format]}"
        if format == "onnx":
            write_onnx(program, path, module.inputs, outputs)
        else:
            memory = io.BytesIO()  # where a file cannot be written, torch ends the process
            torch.export.save(program, memory)
            path.write_bytes(memory.getbuffer())
    _require_same(encoder, load_program(folder / f"vector.{SUFFIX[format]}"))
    tokens = {
        name: None
        if embed.numeric
        else [None, *dataset.field2id_token[name.partition("_")[2]][1:].tolist()]
        for name, embed in encoder.fields.items()
    }
    for name, content in (("items", names), ("features", tokens)):
        if content:
            text = json.dumps(content, ensure_ascii=False)
            (folder / f"{name}.json").write_text(text, encoding="utf-8")
    vectors = encoder.model.item_vectors().numpy()
    np.save(folder / "vectors.npy", vectors)
    flat = pa.array(vectors[1:].reshape(-1))
    columns = {
        "id": pa.array(range(1, len(names)), pa.int64()),
        "name": pa.array(names[1:], pa.string()),
        "vector": pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1]),
    }
    pq.write_table(pa.table(columns), folder / "vectors.parquet")
    text = make_readme(encoder, format, top.k, names, dataset.config)
    (folder / "README.md").write_text(text, encoding="utf-8")


def make_readme(encoder: Encoder, format: str, k: int, names: list[Any], config: Options) -> str:
    """Return the README of an exported model: how to run it, and what its files and inputs are.

    ``names`` are those of the items by id, the first of padding; the next three are the example.
    """
    unit, n = config["timestamp_unit"], encoder.model.max_seq_length
    about = {
        "times": f"float64 [B, L], {unit} as in the data, 0 behind the shorter ones",
        "at": f"float64 [B], the time of each request, {unit} as in the data",
    }
    example = {"items": "np.array([history])", "lengths": "np.array([len(history)])"}
    example["allowed"] = f"np.ones((1, {len(names)}), dtype=bool)"
    example |= {"times": "np.array([times])", "at": "np.array([times[-1] + 3600.0])"}
    for name, embed in encoder.fields.items():
        sizes = [("B", "1"), *[("L", "len(history)")] * name.startswith("events_")]
        sizes += [("s", "1")] * bool(not embed.numeric and embed.is_list)
        symbols, numbers = map(", ".join, zip(*sizes, strict=True))
        kind = "float32" if embed.numeric else "int64"
        what = "a number, NaN for none" if embed.numeric else "ids by `features.json`, 0 for none"
        about[name] = f"{kind} [{symbols}], {what}"
        none = "np.nan" if embed.numeric else "0"
        example[name] = f"np.full(({numbers},), {none}, np.{kind})"
    given = [name for name in Recommend(encoder, k).inputs if (name, format) != ("allowed", "onnx")]
    hourly = [(1.5e9 + 3600 * hour) / SECONDS[unit] for hour in range(len(names[1:4]))]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("export_readme.md.jinja").render(
        model=registered_name(type(encoder.model)),
        version=__version__,
        onnx=format == "onnx",
        suffix=SUFFIX[format],
        history=json.dumps(names[1:4], ensure_ascii=False),
        times=hourly if "times" in given else None,
        given=", ".join(f'"{name}": {example[name]}' for name in given),
        inputs=[(name, about[name]) for name in given if name in about],
        k=k,
        n=n,
        size=f"{len(names):,}",
        d=encoder.model.item_vectors().size(1),
    )


def load_program(path: Path) -> Program:
    """Return a function that runs a written program: from inputs by name to a list of outputs."""
    if path.suffix == ".pt2":
        module = torch.export.load(path).module()

        def evaluate(given: dict[str, Tensor]) -> list[Tensor]:
            outputs = module(*given.values())
            return [outputs] if isinstance(outputs, Tensor) else list(outputs)

        return evaluate
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run(given: dict[str, Tensor]) -> list[Tensor]:
        outputs = session.run(None, {name: x.numpy() for name, x in given.items()})
        return [torch.from_numpy(x) for x in outputs]

    return run


def _require_same(encoder: Encoder, program: Program) -> None:
    """Raise a UsageError unless a program agrees with the model, up to ``TOLERANCE``, on batches of
    sizes it was not traced with."""
    n = encoder.model.max_seq_length
    draw = torch.Generator().manual_seed(0)
    for lengths in ([n], [1], [n, 1, (n + 1) // 2, n, 1]):
        given = random_histories(encoder, torch.tensor(lengths), draw)
        expected, found = encoder(*given.values()), program(given)[0]
        most = TOLERANCE * max(1.0, expected.abs().max().item())
        if not (difference := (expected - found).abs().max().item()) <= most:
            raise UsageError(
                f"{registered_name(type(encoder.model))} cannot be exported: its output differs "
                f"from it by {difference:.1e}"
            )


def random_histories(encoder: Encoder, lengths: Tensor, draw: torch.Generator) -> dict[str, Tensor]:
    """Return random histories of the given lengths [b], as inputs of a program by name."""
    model, size = encoder.model, (len(lengths), int(lengths.max()))
    is_padding = torch.arange(size[1]) >= lengths[:, None]
    items = torch.randint(1, model.n_items, size, generator=draw).masked_fill(is_padding, 0)
    # log-uniform gaps from a second to two weeks, times near those of today in Unix seconds
    gaps = (14 * torch.rand(size, generator=draw, dtype=torch.float64)).exp()
    times = (1.5e9 + gaps.cumsum(1)) / model.time_unit
    given = {"items": items, "lengths": lengths, "times": times.masked_fill(is_padding, 0)}
    given["at"] = times[:, -1] + 3600 / model.time_unit
    given |= encoder.random_features(items.shape, draw)
    return {name: given[name] for name in encoder.inputs}
