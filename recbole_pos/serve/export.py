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

from recbole_pos.data.dataset import Dataset
from recbole_pos.errors import UsageError
from recbole_pos.experiment.run import NeedsDataset, load, load_without_data
from recbole_pos.files import name_write_errors, replace_folder
from recbole_pos.model.models import ensure_registered
from recbole_pos.serve.choice import require_k
from recbole_pos.serve.programs import (
    Encoder,
    Recommend,
    make_encoder,
    require_onnx,
    trace,
    write_onnx,
)
from recbole_pos.values import SECONDS, Options, check_choice
from recbole_pos.version import __version__

SUFFIX = {"onnx": "onnx", "torch_export": "pt2"}  # of the files of each format
TOLERANCE = 1e-4  # difference of a program from the model, relative to the largest entry

Program = Callable[[dict[str, Tensor]], list[Tensor]]


def export(
    run_dir: str | Path,
    to: str | Path,
    format: str = "onnx",
    k: int = 100,
    data_path: str | Path | None = None,
) -> Path:
    """Write a trained model into a folder, from which it is served without this package.

    ``vector`` gives the vector of a history, ``recommend`` the k best items and their scores, of
    those allowed. Beside them are names and vectors of items, and a README with an example.

    Args:
        run_dir: the folder of a run, finished or not; its best weights are used.
        to: a folder that is new or empty.
        format: ``onnx`` or ``torch_export``.
        k: number of items to recommend; all items if there are fewer.
        data_path: the folder that holds the folder of the dataset, which only some models need;
            by default the run's.

    Returns:
        The folder; it appears once all of its files are written.

    Raises:
        UsageError: if the model cannot be exported, or the folder is in use.
        StorageError: if a file cannot be written.
    """
    check_choice("format", format, tuple(SUFFIX))
    k = require_k(k)
    if format == "onnx":
        require_onnx()
    folder = Path(to)
    with name_write_errors(folder):
        if os.path.exists(folder) and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"to: {folder} is in use; name a folder that is new or empty")
    with replace_folder(folder) as unfinished:
        try:
            experiment = load_without_data(run_dir)
        except NeedsDataset:
            experiment = load(run_dir, data_path=data_path)
        encoder = make_encoder(experiment.model)
        with name_write_errors(folder):
            _write_files(encoder, experiment.dataset, unfinished, format, k)
    return folder


def _write_files(encoder: Encoder, dataset: Dataset, folder: Path, format: str, k: int) -> None:
    """Write the programs, names and vectors of items, tokens of features, and README of a model."""
    names = _list_tokens(dataset, dataset.iid_field)
    recommend = Recommend(encoder, min(k, len(names) - 1))
    _write_program(encoder, folder, format, "vector", ("vector",))
    _require_same(encoder, load_program(folder / f"vector.{SUFFIX[format]}"))
    _write_program(recommend, folder, format, "recommend", ("best", "scores"))
    _write_json(folder / "items.json", names)
    if encoder.fields:
        tokens = {
            name: None if embed.numeric else _list_tokens(dataset, name.partition("_")[2])
            for name, embed in encoder.fields.items()
        }
        _write_json(folder / "features.json", tokens)
    vectors = encoder.model.item_vectors().numpy()
    np.save(folder / "vectors.npy", vectors)
    columns = {
        "id": pa.array(range(1, len(names)), pa.int64()),
        "name": pa.array(names[1:], pa.string()),
        "vector": pa.FixedSizeListArray.from_arrays(
            pa.array(vectors[1:].reshape(-1)), vectors.shape[1]
        ),
    }
    pq.write_table(pa.table(columns), folder / "vectors.parquet")
    readme = _render_readme(encoder, format, recommend.k, names, dataset.config)
    (folder / "README.md").write_text(readme, encoding="utf-8")


def _write_program(
    module: Encoder | Recommend, folder: Path, format: str, name: str, outputs: tuple[str, ...]
) -> None:
    """Trace a module and write it to a file ``name``; raise a UsageError if that is impossible."""
    program = trace(module)
    path = folder / f"{name}.{SUFFIX[format]}"
    if format == "onnx":
        write_onnx(program, path, module.inputs, outputs)
    else:
        # torch would end the process if it could not write the file itself
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
        path.write_bytes(buffer.getbuffer())


def _list_tokens(dataset: Dataset, field: str) -> list[Any]:
    """Return the tokens of a field by id, None for id 0."""
    return [None, *dataset.field2id_token[field][1:].tolist()]


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _render_readme(encoder: Encoder, format: str, k: int, names: list[Any], config: Options) -> str:
    """Return the README of an exported model, with its first three items (by id) as the example."""
    unit = config["timestamp_unit"]
    descriptions = {
        "times": f"float64 [B, L], {unit} as in the data, 0 behind the shorter ones",
        "at": f"float64 [B], the time of each request, {unit} as in the data",
    }
    examples = {
        "items": "np.array([history])",
        "lengths": "np.array([len(history)])",
        "allowed": f"np.ones((1, {len(names)}), dtype=bool)",
        "times": "np.array([times])",
        "at": "np.array([times[-1] + 3600.0])",
    }
    for name, embed in encoder.fields.items():
        descriptions[name], examples[name] = _describe_feature(name, embed)
    inputs = list(Recommend(encoder, k).inputs)
    if format == "onnx":  # in which this input is optional
        inputs.remove("allowed")
    times = [(1.5e9 + 3600 * hour) / SECONDS[unit] for hour in range(len(names[1:4]))]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("export_readme.md.jinja").render(
        model=ensure_registered(type(encoder.model)),
        version=__version__,
        onnx=format == "onnx",
        suffix=SUFFIX[format],
        history=json.dumps(names[1:4], ensure_ascii=False),
        times=times if "times" in inputs else None,
        given=", ".join(f'"{name}": {examples[name]}' for name in inputs),
        inputs=[(name, descriptions[name]) for name in inputs if name in descriptions],
        k=k,
        n=encoder.model.max_seq_length,
        size=f"{len(names):,}",
        d=encoder.model.item_vectors().size(1),
    )


def _describe_feature(name: str, embed: Any) -> tuple[str, str]:
    """Return the description of a feature input, and Python code for an example of its value."""
    sizes = {"B": "1"}
    if name.startswith("events_"):
        sizes["L"] = "len(history)"
    if not embed.numeric and embed.is_list:
        sizes["s"] = "1"
    if embed.numeric:
        dtype, missing_value, meaning = "float32", "np.nan", "a number, NaN for none"
    else:
        dtype, missing_value, meaning = "int64", "0", "ids by `features.json`, 0 for none"
    description = f"{dtype} [{', '.join(sizes)}], {meaning}"
    return description, f"np.full(({', '.join(sizes.values())},), {missing_value}, np.{dtype})"


def load_program(path: Path) -> Program:
    """Return a function that runs a written program: from inputs by name to a list of outputs."""
    if path.suffix == ".pt2":
        module = torch.export.load(path).module()

        def run_torch(inputs: dict[str, Tensor]) -> list[Tensor]:
            outputs = module(*inputs.values())
            return [outputs] if isinstance(outputs, Tensor) else list(outputs)

        return run_torch
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run_onnx(inputs: dict[str, Tensor]) -> list[Tensor]:
        outputs = session.run(None, {name: x.numpy() for name, x in inputs.items()})
        return [torch.from_numpy(x) for x in outputs]

    return run_onnx


def _require_same(encoder: Encoder, program: Program) -> None:
    """Raise a UsageError unless a program agrees with the model on batches of several sizes."""
    n = encoder.model.max_seq_length
    generator = torch.Generator().manual_seed(0)
    for lengths in ([n], [1], [n, 1, (n + 1) // 2, n, 1]):
        inputs = encoder.random_inputs(torch.tensor(lengths), generator)
        expected = encoder(*inputs.values())
        difference = (expected - program(inputs)[0]).abs().max().item()
        limit = TOLERANCE * max(1.0, expected.abs().max().item())
        if not difference <= limit:  # which is also true of NaN
            raise UsageError(
                f"{ensure_registered(type(encoder.model))} cannot be exported: its output differs "
                f"from it by {difference:.1e}"
            )
