"""A trained model as files that need neither RecBole nor this package.

:func:`export` writes programs of torch.export or ONNX: an :class:`Encoder` of histories as vectors,
and :class:`Recommend`, which ranks items. Sizes of batches and lengths of histories are symbolic.
"""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from recbole_pos.data.dataset import Dataset
from recbole_pos.errors import UsageError
from recbole_pos.experiment.run import NeedsDataset, load, load_without_data
from recbole_pos.files import name_write_errors, replace_folder
from recbole_pos.layers.forward import encode_queries
from recbole_pos.layers.sequence_batch import Features, PaddedBatch
from recbole_pos.model.base import PosRecommender
from recbole_pos.model.models import ensure_registered
from recbole_pos.serve.scorer import require_k
from recbole_pos.values import SECONDS, Options, check_choice
from recbole_pos.version import __version__

SUFFIX = {"onnx": "onnx", "torch_export": "pt2"}  # format of a program -> suffix of its file
TOLERANCE = 1e-4  # difference of a program from the model, relative to the largest entry
_EXAMPLE_TIME = 1.5e9  # seconds since 1970, in July 2017

# A written program as a function: from inputs by name to a list of outputs.
Program = Callable[[dict[str, Tensor]], list[Tensor]]


def export(
    run_dir: str | Path,
    to: str | Path,
    format: str = "onnx",
    k: int = 100,
    data_path: str | Path | None = None,
) -> Path:
    """Write a trained model into a folder, from which it is served without this package.

    The program ``vector`` gives the vector of a history, ``recommend`` the k best of allowed items
    and their scores. Beside them are names and vectors of items, and a README with an example.

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
    check_choice("format", format, tuple(SUFFIX))  # its keys: names of formats
    k = require_k(k)
    if format == "onnx":
        require_onnx()
    folder = Path(to)
    with name_write_errors(folder):
        if os.path.exists(folder) and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"to: {folder} is in use; name a folder that is new or empty")
    with replace_folder(folder) as unfinished:  # gets its name when the block ends
        try:
            experiment = load_without_data(run_dir)
        except NeedsDataset:  # the model reads more of it than names of items
            experiment = load(run_dir, data_path=data_path)
        encoder = make_encoder(experiment.model)
        with name_write_errors(folder):
            _write_files(encoder, experiment.dataset, unfinished, format, k)
    return folder


def _write_files(encoder: Encoder, dataset: Dataset, folder: Path, format: str, k: int) -> None:
    """Write all files of an exported model: programs, names and vectors of items, and a README.

    Args:
        encoder: the model, as a module from histories to vectors.
        dataset: its dataset, for names of items and tokens.
        folder: folder to write into.
        format: ``onnx`` or ``torch_export``.
        k: number of items to recommend; all if there are fewer.
    """
    # The program ``vector``, which must give the same vectors of histories as the model.
    _write_program(encoder, folder, format, "vector", ("vector",))
    _require_same(encoder, load_program(folder / f"vector.{SUFFIX[format]}"))

    # The program ``recommend``.
    names = _list_tokens(dataset, dataset.iid_field)  # of items by id; names[0] is padding (None)
    num_items = len(names) - 1
    recommend = Recommend(encoder, min(k, num_items))
    _write_program(recommend, folder, format, "recommend", ("best", "scores"))

    # The programs read ids: write the names of the items, and the tokens of each feature, by id. A
    # feature of numbers has no tokens (None).
    names_by_file: dict[str, Any] = {"items.json": names}
    tokens_by_input: dict[str, list[Any] | None] = {}
    for name, embed in encoder.fields.items():
        _table, _, field = name.partition("_")  # events_brand is the field brand of interactions
        tokens_by_input[name] = None if embed.numeric else _list_tokens(dataset, field)
    if tokens_by_input:
        names_by_file["features.json"] = tokens_by_input
    for file, content in names_by_file.items():
        (folder / file).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")

    # Vectors of items, for a search by vectors; row 0 is padding.
    np.save(folder / "vectors.npy", encoder.model.item_vectors().numpy())

    readme = _render_readme(encoder, format, recommend.k, names, dataset.config)
    (folder / "README.md").write_text(readme, encoding="utf-8")


def _write_program(
    module: Encoder | Recommend, folder: Path, format: str, name: str, outputs: tuple[str, ...]
) -> None:
    """Trace a module into a program and write it to a file.

    Args:
        module: what the program computes.
        folder: folder to write into.
        format: ``onnx`` or ``torch_export``.
        name: name of the file without its suffix.
        outputs: names of the outputs.
    """
    program = trace(module)
    path = folder / f"{name}.{SUFFIX[format]}"
    if format == "onnx":
        write_onnx(program, path, module.inputs, outputs)
    else:
        buffer = io.BytesIO()  # given a path, torch would end the process if the disk is full
        torch.export.save(program, buffer)
        path.write_bytes(buffer.getbuffer())


def _list_tokens(dataset: Dataset, field: str) -> list[Any]:
    """Return the tokens of a field by id, None for id 0."""
    return [None, *dataset.field2id_token[field][1:].tolist()]


def _render_readme(encoder: Encoder, format: str, k: int, names: list[Any], config: Options) -> str:
    """Return the README of an exported model, with an example in Python that runs.

    Args:
        encoder: the exported model.
        format: ``onnx`` or ``torch_export``.
        k: number of items that it recommends.
        names: names of items by id, None for the padding item 0. The items 1 to 3, an hour after
            each other, are the history of the example.
        config: options of the run.
    """
    unit, history = config["timestamp_unit"], names[1:4]
    times = [(_EXAMPLE_TIME + 3600 * hour) / SECONDS[unit] for hour in range(len(history))]
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
        inputs=encoder.inputs,
        features=_describe_features(encoder),
        history=json.dumps(history, ensure_ascii=False),
        times=times,
        unit=unit,
        num_recommended=k,
        num_items=len(names),
        max_length=encoder.model.max_seq_length,
        width=encoder.model.item_vectors().size(1),
    )


def _describe_features(encoder: Encoder) -> list[tuple[str, str, str]]:
    """Describe the inputs of an exported program that are features, for its README.

    Args:
        encoder: the exported model. ``fields`` has the layer that embeds each of these inputs, by
            name, and ``axes`` the dimensions of an input, a letter each: B histories, L
            interactions of the longest one, s values of a feature whose values are lists.

    Returns:
        Name, description and example of each input. A rating of interactions has the description
        "float32 [B, L], a number, NaN for none". The example is Python code of the input for one
        history (a list ``history``) without ratings: "np.full([1, len(history)], np.nan, ...)".
    """
    features = []
    code_of_size = {"B": "1", "L": "len(history)", "s": "1"}  # sizes of the example's dimensions
    for name, layer in encoder.fields.items():
        if layer.numeric:
            dtype, missing, meaning = "float32", "np.nan", "a number, NaN for none"
        else:
            dtype, missing, meaning = "int64", "0", "ids by `features.json`, 0 for none"
        axes = encoder.axes[name]
        description = f"{dtype} [{', '.join(axes)}], {meaning}"
        shape = ", ".join(code_of_size[axis] for axis in axes)
        example = f"np.full([{shape}], {missing}, np.{dtype})"
        features.append((name, description, example))
    return features


def load_program(path: Path) -> Program:
    """Return a function that runs an exported program.

    Args:
        path: the file, ``.pt2`` of torch.export or ``.onnx``.

    Returns:
        A function from tensors by name of the input, in the order of the program's inputs, to the
        list of its outputs, on the CPU.
    """
    if path.suffix == ".pt2":
        module = torch.export.load(path).module()

        def run_torch(inputs: dict[str, Tensor]) -> list[Tensor]:
            outputs = module(*inputs.values())
            return [outputs] if isinstance(outputs, Tensor) else list(outputs)

        return run_torch

    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # log errors only
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run_onnx(inputs: dict[str, Tensor]) -> list[Tensor]:
        outputs = session.run(None, {name: x.numpy() for name, x in inputs.items()})
        return [torch.from_numpy(x) for x in outputs]

    return run_onnx


def _require_same(encoder: Encoder, program: Program) -> None:
    """Raise a UsageError unless a program gives the same vectors as the model it was made of.

    Args:
        encoder: the model.
        program: the exported program, as :func:`load_program` returns it.
    """
    n = encoder.model.max_seq_length
    generator = torch.Generator().manual_seed(0)
    # Both encode random histories: a full one, one of one interaction, and a batch with both.
    for lengths in ([n], [1], [n, 1, (n + 1) // 2, n, 1]):
        inputs = encoder.random_inputs(torch.tensor(lengths), generator)
        expected = encoder(*inputs.values())  # vectors [B, d], as the program's first output
        difference = (expected - program(inputs)[0]).abs().max().item()
        limit = TOLERANCE * max(1.0, expected.abs().max().item())
        if not difference <= limit:  # not "difference > limit", which is false for NaN
            raise UsageError(
                f"{ensure_registered(type(encoder.model))} cannot be exported: its output differs "
                f"from it by {difference:.1e}"
            )


class Encoder(nn.Module):
    """Encodes a history as the vector whose product with an item's vector is the score.

    Args:
        model: the trained model, on a CPU.

    Attributes:
        fields: embeddings by the names of feature inputs, such as ``events_rating`` or ``user_age``
            for the field rating of interactions or age of users.
        axes: dimensions of each input of :meth:`forward`, in order, a letter each; see __init__.
        inputs: names of the inputs.
    """

    def __init__(self, model: PosRecommender) -> None:
        """Freeze the model, and list the inputs that it reads, with the dimensions of each.

        ``axes`` has a letter for each dimension of an input: B is the number of histories, L the
        number of interactions of the longest one, and s the number of values of the longest list,
        for features whose values are lists, such as the genres of a film. So "BL" stands for the
        shape [B, L], and "BLs" for [B, L, s].
        """
        super().__init__()
        self.model = model.eval().requires_grad_(False)

        # Histories; and, if the model reads them, times of the interactions and of the requests.
        self.axes = {"items": "BL", "lengths": "B"}
        if model.needs_time:
            self.axes["times"] = "BL"
        if model.reads_request:
            self.axes["at"] = "B"

        # Features: one input for each field of interactions ("events") or of users ("user"), such
        # as events_rating or user_age. ``fields`` has the layer that embeds it. A feature that is
        # no number has tokens, one for each value, or a list of them.
        tables = {} if model.event_features is None else model.event_features.by_table()
        self.fields = {}
        for table, embeds in tables.items():
            for field, embed in embeds.items():
                name, is_list = f"{table}_{field}", not embed.numeric and embed.is_list
                self.fields[name] = embed
                self.axes[name] = ("BL" if table == "events" else "B") + ("s" if is_list else "")
        self.inputs = tuple(self.axes)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the vectors [B, d] of histories.

        Args:
            inputs: those named by ``self.inputs``: items [B, L] padded with 0 on the right, lengths
                [B], times [B, L] and times of requests [B] in float64, features of interactions
                [B, L] or [B, L, s], of users [B] or [B, s].
        """
        model, values = self.model, dict(zip(self.inputs, inputs, strict=True))
        items, lengths = values.pop("items"), values.pop("lengths")
        times = model.to_seconds(values.pop("times", None))
        at = model.to_seconds(values.pop("at", None))

        # The other inputs are features: events_rating is the feature rating of interactions.
        features = Features()
        for name, value in values.items():
            table, _, field = name.partition("_")
            of_table = features.events if table == "events" else features.users
            of_table[field] = value

        batch = PaddedBatch.from_rows(items, lengths, model.max_seq_length, times, at, features)
        return encode_queries(model, batch)

    def random_inputs(self, lengths: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return random histories as the inputs of :meth:`forward` by name, in its order.

        Args:
            lengths: [B] number of interactions of each history.
            generator: torch's generator of random numbers.
        """
        # Items, padded on the right with 0, and times, in the unit of the time field, with gaps of
        # 1 second to 10^6 seconds (12 days).
        model = self.model
        num_histories, longest = len(lengths), int(lengths.max())
        shape = (num_histories, longest)
        is_padding = torch.arange(longest) >= lengths[:, None]
        items = torch.randint(1, model.n_items, shape, generator=generator)
        gaps = 10 ** (6 * torch.rand(shape, generator=generator, dtype=torch.float64))
        times = (_EXAMPLE_TIME + gaps.cumsum(1)) / model.time_unit
        values = {
            "items": items.masked_fill(is_padding, 0),
            "lengths": lengths,
            "times": times.masked_fill(is_padding, 0),
            "at": times[:, -1],  # the requests
        }
        # Features: numbers, or ids of tokens; each id has a row in the layer's table of embeddings.
        # Padding has random values, too, since no model reads them. ``axes`` has the dimensions of
        # a feature as letters, such as "BL" for a value of each interaction.
        sizes = {"B": num_histories, "L": longest, "s": 2}  # s: values in a list
        for name, layer in self.fields.items():
            feature_shape = [sizes[axis] for axis in self.axes[name]]
            if layer.numeric:
                values[name] = torch.randn(feature_shape, generator=generator)
            else:
                num_ids = len(layer.table)
                values[name] = torch.randint(num_ids, feature_shape, generator=generator)
        return {name: values[name] for name in self.inputs}  # only those that the model reads


class Recommend(nn.Module):
    """Recommends the k best of the allowed items after a history, best first."""

    def __init__(self, encoder: Encoder, k: int) -> None:
        super().__init__()
        self.encoder, self.k = encoder, k
        self.inputs = (*encoder.inputs[:2], "allowed", *encoder.inputs[2:])

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the k items with the highest scores after each of B histories, best first.

        Args:
            inputs: those of :class:`Encoder`, and in third place ``allowed`` [B or 1, items] bool:
                the items that may be recommended to each history, or to all; never the padding, 0.

        Returns:
            Item ids and scores, both [B, k]; 0 and -inf where fewer than k items are allowed.
        """
        items, lengths, allowed, *further_inputs = inputs
        vectors = self.encoder(items, lengths, *further_inputs)
        scores = vectors @ self.encoder.model.item_vectors().t()
        is_padding = torch.arange(scores.size(1)) == 0
        excluded = ~_repeat_single_row(allowed, scores.size(0)) | is_padding
        best_scores, best = scores.masked_fill(excluded, -torch.inf).topk(self.k)
        return best.masked_fill(best_scores == -torch.inf, 0), best_scores


def _repeat_single_row(table: Tensor, num_rows: int) -> Tensor:
    """Return a table of ``num_rows`` rows as it is; of a table of one row, repeat this row.

    A traced program may get either table, and ``expand`` or an ``if`` would make it keep to the one
    that it was traced with. So rows are taken by index: row min(i, last row) becomes row i. For
    three rows these are [0, 1, 2] of a table with three, and [0, 0, 0] of one with a single row.
    """
    last_row = torch.arange(table.size(0))[-1:]
    index = torch.minimum(torch.arange(num_rows), last_row)
    return table.index_select(0, index)


def make_encoder(model: Any) -> Encoder:
    """Wrap a trained model as an Encoder, which makes vectors of histories; both go to the CPU.

    Raises:
        UsageError: if the model does not score by products of the vectors of a history and of
            items, or reads more than the history.
    """
    # An encoder replaces the methods ``compute_states`` and ``full_sort_predict`` of the plugin's
    # models, so a model may not have its own. Nor may it be one that ``prepares`` batches: that
    # makes a graph of each history, or looks up other histories, before it computes anything.
    can_be_exported = (
        isinstance(model, PosRecommender)
        and not model.prepares
        and type(model).compute_states is PosRecommender.compute_states
        and type(model).full_sort_predict is PosRecommender.full_sort_predict
    )
    if not can_be_exported:
        raise UsageError(
            f"{ensure_registered(type(model))} cannot be exported: a program reads one history by "
            "the plugin's layers. RecBole's models, AttrFormer, models of graphs, and models with "
            "states or scores of their own do more; `recbole-pos serve` answers with any model"
        )
    return Encoder(model.to("cpu"))


def trace(module: Encoder | Recommend) -> ExportedProgram:
    """Record what a module computes as a program for any number of histories of any length.

    torch calls the module with an example of its inputs and records the operations. It is told
    which dimensions of the inputs may have other sizes than those of the example.

    Raises:
        UsageError: if torch cannot record it.
    """
    # The example: three histories, and items that are allowed, which only :class:`Recommend` reads,
    # in two rows. Its sizes are no special cases: torch takes a size of 1 as fixed, and could take
    # equal sizes, or a length equal to the longest possible one (n), to be always equal.
    encoder = module.encoder if isinstance(module, Recommend) else module
    n = encoder.model.max_seq_length
    length = n - 1 if n > 2 else n
    inputs = encoder.random_inputs(torch.full((3,), length), torch.Generator())
    inputs["allowed"] = torch.ones(2, encoder.model.n_items, dtype=torch.bool)
    sizes = _declare_sizes(encoder)

    # torch wants sizes for each parameter of ``forward``. That is one, ``*inputs``, whose sizes are
    # those of all inputs. The last option lets the program check at run time what torch cannot
    # prove of sizes.
    example = tuple(inputs[name] for name in module.inputs)
    input_sizes = tuple(sizes[name] for name in module.inputs)
    try:
        return torch.export.export(
            module,
            example,
            dynamic_shapes=(input_sizes,),
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    except Exception as error:  # torch raises errors of many kinds
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UsageError(
            f"{ensure_registered(type(encoder.model))} cannot be exported: "
            f"torch.export refuses it: {reason}"
        ) from error


def _declare_sizes(encoder: Encoder) -> dict[str, list[Any]]:
    """Return for each input of a program, by name, the sizes of its dimensions.

    A size that may differ from call to call is a Dim of torch, and a fixed one None. Dimensions
    with the same Dim have the same size. A model that reads items only has {"items": [batch,
    length], "lengths": [batch], "allowed": [rows, None]}.
    """
    n = encoder.model.max_seq_length
    batch = Dim("batch")
    length = Dim("length", min=1, max=n) if n > 1 else None  # fixed if it can only be 1
    # ``allowed`` says which items may be recommended, in a row for each history or one for all.
    sizes: dict[str, list[Any]] = {"allowed": [Dim("rows"), None]}  # None: the number of items
    # ``axes`` has a letter for each dimension: B histories, L interactions of the longest one, and
    # s values of the longest list, which differs from feature to feature.
    for name, axes in encoder.axes.items():
        dims = {"B": batch, "L": length, "s": Dim(f"longest_{name}", min=1)}
        sizes[name] = [dims[axis] for axis in axes]
    return sizes


def require_onnx() -> None:
    """Raise a UsageError unless the packages that write and run ONNX are installed."""
    for package in ("onnx", "onnxruntime", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            raise UsageError(
                f"format onnx needs {package}, which is not installed: "
                "pip install 'recbole-pos[export]'; or choose the format torch_export"
            )


def write_onnx(
    program: ExportedProgram, path: Path, inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> None:
    """Write a traced program as an ONNX file.

    Args:
        program: the program as torch.export made it.
        path: file to write.
        inputs: names of its inputs.
        outputs: names of its outputs.

    Raises:
        UsageError: if torch cannot translate it.
    """
    # Two operations of torch are translated by functions of ours: ONNX has no cummin, and the
    # exporter's own translation of scalar_tensor loses digits of times.
    try:
        with _silence_exporter():
            onnx_program = torch.onnx.export(
                program.run_decompositions({torch.ops.aten.cummin.default: _cummin}),
                input_names=inputs,
                output_names=outputs,
                custom_translation_table={torch.ops.aten.scalar_tensor.default: _scalar},
                verbose=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        lines = str(error.__cause__ or error).splitlines()
        raise UsageError(
            f"the model cannot be written as ONNX: {lines[0]}; choose the format torch_export"
        ) from error

    assert onnx_program is not None
    onnx_program.save(str(path))


def _cummin(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the minima of torch.cummin, by operations that ONNX has, and zeros for its indices.

    The minimum i is that of the entries 0 to i: [3, 1, 2] becomes [3, 1, 1]. No model reads the
    indices.

    Args:
        x: floats.
        dim: dimension along which the minimum goes.
    """
    # Compare each entry with all; later ones are set to infinity, as no minimum: n * n operations.
    index = torch.arange(x.size(dim), device=x.device)
    is_later = index[:, None] < index
    entries = x.movedim(dim, -1).unsqueeze(-2).masked_fill(is_later, torch.inf)
    lowest = entries.amin(-1).movedim(-1, dim)
    return lowest, torch.zeros_like(lowest, dtype=torch.int64)


def _scalar(
    value: Any, dtype: Any = 1, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Any:
    """Translate torch's ``scalar_tensor``, which makes a tensor of one number, into ONNX.

    torch's exporter calls this with the arguments of ``scalar_tensor`` (`write_onnx` tells it to).
    Its own translation goes through float32, in which seconds since 1970 lose digits.

    Args:
        value: a number, which becomes a constant of the ONNX program; or a value that the program
            computes, such as the length of the histories that it is given.
        dtype: number of ONNX's type; 1 is float32.
        layout, device, pin_memory: they mean nothing in ONNX.
    """
    import onnx
    from onnxscript import opset18

    if not isinstance(value, (int, float)):
        return opset18.Cast(value, to=int(dtype))
    return opset18.Constant(value=onnx.helper.make_tensor("scalar", int(dtype), (), [value]))


@contextmanager
def _silence_exporter() -> Iterator[None]:
    """Hide warnings, and logs below errors, of torch's ONNX exporter in a ``with`` block."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
