"""The README of an exported model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from recbole_pos.serve.programs import Encoder
from recbole_pos.values import SECONDS, Options
from recbole_pos.version import __version__

_WORDS = {
    "onnx": {
        "suffix": "onnx",
        "needs": "pip install onnxruntime",
        "importing": "onnxruntime",
        "quiet": "onnxruntime.set_default_logger_severity(3)  # it warns of defaults\n",
        "program": 'onnxruntime.InferenceSession("recommend.onnx")',
        "run": "program.run(None, given)",
        "vector": 'vector = onnxruntime.InferenceSession("vector.onnx").run(None, given)[0]',
        "optional": "; may be left out",
    },
    "torch_export": {
        "suffix": "pt2",
        "needs": "pip install torch numpy",
        "importing": "torch",
        "quiet": "",
        "program": 'torch.export.load("recommend.pt2").module()',
        "run": "program(*map(torch.from_numpy, given.values()))",
        "vector": 'del given["allowed"]\n'
        'program = torch.export.load("vector.pt2").module()\n'
        "vector = program(*map(torch.from_numpy, given.values())).numpy()",
        "optional": "",
    },
}

_LINES = """import json
import {importing}
import numpy as np

names = json.load(open("items.json", encoding="utf-8"))
ids = {{name: id for id, name in enumerate(names)}}
history = [ids[name] for name in {some}][-{n}:]  # oldest first
{times}{quiet}program = {program}
given = {{{given}}}
items, scores = {run}
print([(names[item], score) for item, score in zip(items[0, :10], scores[0, :10])])"""

_PAGE = """# {model}, exported by recbole-pos {version}

```python
{lines}
```

Needs `{needs}`. Run it in this folder.

| file | |
|---|---|
| `vector.{suffix}` | `items`, `lengths`{more} to the vector of each history, [B, {d}] |
| `recommend.{suffix}` | the same, `allowed` to the {k} best items, best first, and their scores |
| `items.json` | the name of each id; id 0 is padding |
| `vectors.npy` | the vector of each id, [{items:,}, {d}]: a score is its product with a history's |
| `vectors.parquet` | `id`, `name`, `vector` |

- `items` is int64 [B, L], the ids of each history, oldest first, 0 behind the shorter ones. L is at
  most {n}: of longer histories give the newest {n} interactions.
- `lengths` is int64 [B], 1 to L.
{about}\
- `allowed` is boolean [1, {items:,}] for all or [B, {items:,}] for each history, true where an item
  may be recommended{optional}. Where fewer than {k} may, the rest is item 0 with the score -inf.
  Items of the past are left out only if you exclude them here.

## An approximate index

For catalogues of millions, where the product with every item takes long. `pip install faiss-cpu`:

```python
import faiss
vectors = np.load("vectors.npy")[1:]  # without padding
index = faiss.IndexHNSWFlat(vectors.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
index.add(vectors)
{vector}
scores, places = index.search(vector, 10)
print([names[1 + place] for place in places[0]])
```
"""


def write_readme(
    model: str, encoder: Encoder, format: str, k: int, names: list[Any], config: Options
) -> str:
    """Return the README of an exported model: how to run it, and what its files and inputs are.

    Args:
        model: name of the model.
        encoder: the exported encoder, for its inputs.
        format: ``onnx`` or ``torch_export``.
        k: number of recommended items.
        names: names of the items by id; the first is padding.
        config: configuration of the run.
    """
    unit, n = config["timestamp_unit"], encoder.model.max_seq_length
    same = f"{unit} as in the data"
    about = {
        "times": f"- `times` is float64 [B, L], {same}, 0 behind the shorter ones.\n",
        "at": f"- `at` is float64 [B], the time of each request, {same}.\n",
    }
    for name, embed in encoder.fields.items():
        kind = "float32" if embed.numeric else "int64"
        what = "a number, NaN for none" if embed.numeric else "ids by `features.json`, 0 for none"
        size = ", ".join(_sizes(name, embed, "B", "L", "s"))
        about[name] = f"- `{name}` is {kind} [{size}], {what}.\n"
    return _PAGE.format(
        **_WORDS[format],
        model=model,
        version=__version__,
        lines=write_lines(format, encoder.inputs, names, n, unit, encoder.fields),
        more="".join(f", `{name}`" for name in encoder.inputs),
        about="".join(about[name] for name in encoder.inputs),
        k=k,
        n=n,
        items=len(names),
        d=encoder.model.item_vectors().size(1),
    )


def _sizes(name: str, embed: Any, histories: str, events: str, tokens: str) -> list[str]:
    """Return the dimensions of a feature input: users, perhaps interactions, perhaps tokens."""
    is_list = not embed.numeric and embed.is_list
    return [histories, *[events] * name.startswith("events_"), *[tokens] * bool(is_list)]


def write_lines(
    format: str,
    inputs: list[str],
    names: list[Any],
    n: int,
    unit: str = "seconds",
    fields: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Return a Python program that recommends after a history of three items.

    Args:
        format: ``onnx`` or ``torch_export``.
        inputs: names of the inputs beside items and lengths.
        names: names of the items by id; the first is padding.
        n: longest history that the model reads.
        unit: unit of the time field.
        fields: what embeds the feature inputs, by name; the program gives them missing values.
    """
    hourly_times = [(1.5e9 + 3600 * hour) / SECONDS[unit] for hour in range(len(names[1:4]))]
    given = {"items": "np.array([history])", "lengths": "np.array([len(history)])"}
    if format == "torch_export":
        given["allowed"] = f"np.ones((1, {len(names)}), dtype=bool)"
    values = {"times": "np.array([times])", "at": "np.array([times[-1] + 3600.0])"}
    for name, embed in fields.items():
        size = ", ".join(_sizes(name, embed, "1", "len(history)", "1"))
        none = "np.nan, np.float32" if embed.numeric else "0, np.int64"
        values[name] = f"np.full(({size},), {none})"
    given |= {name: values[name] for name in inputs}
    return _LINES.format(
        **_WORDS[format],
        some=json.dumps(names[1:4], ensure_ascii=False),
        n=n,
        times=f"times = {hourly_times!r}[-{n}:]\n" if "times" in inputs else "",
        given=", ".join(f'"{name}": {value}' for name, value in given.items()),
    )
