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
from torch import Tensor

from recbole_pos.data.protocols import Dataset
from recbole_pos.errors import UsageError
from recbole_pos.experiment.catalogue import NeedsDataset
from recbole_pos.experiment.run import load, load_without_data
from recbole_pos.files import replacing, writing
from recbole_pos.model.models import registered_name
from recbole_pos.serve.export_readme import write_readme
from recbole_pos.serve.programs import (
    Encoder,
    Recommend,
    input_names,
    make_encoder,
    require_onnx,
    trace,
    write_onnx,
)
from recbole_pos.values import check_choice, is_whole, shown

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
    with writing(folder):
        if os.path.exists(folder) and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"--to {folder} is in use; name a folder that is new or empty")
    with replacing(folder) as unfinished:
        try:
            experiment = load_without_data(run_dir)
        except NeedsDataset:
            experiment = load(run_dir, data_path=data_path)
        encoder = make_encoder(experiment.model, inference_relations)
        with writing(folder):
            _write(encoder, experiment.dataset, unfinished, format, k)
    return folder


def _write(encoder: Encoder, dataset: Dataset, folder: Path, format: str, k: int) -> None:
    """Write the programs, names and vectors of items, values of fields, and README of a model.

    Raises:
        UsageError: if a program cannot be made, or differs from the model.
    """
    k = min(k, dataset.item_num - 1)
    parts: list[tuple[str, Encoder | Recommend, tuple[str, ...]]] = [
        ("vector", encoder, ("vector",)),
        ("recommend", Recommend(encoder, k), ("best", "scores")),
    ]
    for name, module, outputs in parts:
        program, path = trace(module), folder / f"{name}.{SUFFIX[format]}"
        if format == "onnx":
            write_onnx(program, path, input_names(module), outputs)
        else:
            memory = io.BytesIO()  # where a file cannot be written, torch ends the process
            torch.export.save(program, memory)
            path.write_bytes(memory.getbuffer())
        if isinstance(module, Encoder):
            _require_same(module, load_program(path))
    names = [None, *dataset.field2id_token[dataset.iid_field][1:].tolist()]
    vectors = encoder.model.item_vectors().numpy()
    (folder / "items.json").write_text(json.dumps(names, ensure_ascii=False), encoding="utf-8")
    np.save(folder / "vectors.npy", vectors)
    if encoder.fields:
        tokens = {
            name: None
            if embed.numeric
            else [None, *dataset.field2id_token[name.partition("_")[2]][1:].tolist()]
            for name, embed in encoder.fields.items()
        }
        (folder / "features.json").write_text(
            json.dumps(tokens, ensure_ascii=False), encoding="utf-8"
        )
    pq.write_table(_table(names, vectors), folder / "vectors.parquet")
    text = write_readme(
        registered_name(type(encoder.model)), encoder, format, k, names, dataset.config
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def _table(names: list[Any], vectors: np.ndarray) -> pa.Table:
    """Return ids, names and vectors of items as a table, without padding."""
    flat = pa.array(vectors[1:].reshape(-1))
    columns = {
        "id": pa.array(range(1, len(names)), pa.int64()),
        "name": pa.array(names[1:], pa.string()),
        "vector": pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1]),
    }
    return pa.table(columns)


def load_program(path: Path) -> Program:
    """Return a function that runs a written program: from inputs by name to a list of outputs."""
    if path.suffix == ".pt2":
        module = torch.export.load(path).module()
        return lambda given: _list(module(*given.values()))
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run(given: dict[str, Tensor]) -> list[Tensor]:
        outputs = session.run(None, {name: x.numpy() for name, x in given.items()})
        return [torch.from_numpy(x) for x in outputs]

    return run


def _list(outputs: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def _require_same(encoder: Encoder, program: Program) -> None:
    """Check that a program agrees with the model on batches of sizes it was not traced with.

    Raises:
        UsageError: if an output differs by more than ``TOLERANCE``.
    """
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
    return {name: given[name] for name in input_names(encoder)}
