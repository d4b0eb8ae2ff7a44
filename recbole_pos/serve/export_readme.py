"""The README of an exported model."""

from __future__ import annotations

import json
from typing import Any

from recbole_pos.serve.programs import Encoder
from recbole_pos.values import SECONDS, Options
from recbole_pos.version import __version__

_OPEN = {
    "onnx": (
        "import onnxruntime",
        'onnxruntime.InferenceSession("recommend.onnx")',
        "pip install onnxruntime",
    ),
    "torch_export": (
        "import torch",
        'torch.export.load("recommend.pt2").module()',
        "pip install torch numpy",
    ),
}

_PAGE = """# {model}, exported by recbole-pos {version}

```python
{lines}
```

Needs `{needs}`. Run it in this folder.

| file | |
|---|---|
| `vector.{suffix}` | `items`, `lengths`{times} to the vector of each history, [B, {d}] |
| `recommend.{suffix}` | the same, `allowed` to the {k} best items, best first, and their scores |
| `items.json` | the name of each id; id 0 is padding |
| `vectors.npy` | the vector of each id, [{items:,}, {d}]: a score is its product with a history's |
| `vectors.parquet` | `id`, `name`, `vector` |

- `items` is int64 [B, L], the ids of each history, oldest first, 0 behind the shorter ones. L is at
  most {n}: of longer histories give the newest {n} events.
- `lengths` is int64 [B], 1 to L.
{about_times}\
- `allowed` is boolean [1, {items:,}] for all or [B, {items:,}] for each history, true where an item
  may be recommended{optional}. Where fewer than {k} may, the rest is item 0 with the score -inf.
  Items of the past are left out only if you say so here.

## An approximate index

For catalogues of millions, where the product with every item takes long. `pip install faiss-cpu`:

```python
{index}
```
"""


def readme(
    model: str, encoder: Encoder, format: str, k: int, names: list[Any], config: Options
) -> str:
    """What stands in the folder."""
    onnx, n = format == "onnx", encoder.model.max_seq_length
    unit = config["timestamp_unit"]
    same = f"{unit} as in the data"
    about = {
        "times": f"- `times` is float64 [B, L], {same}, 0 behind the shorter ones.\n",
        "at": f"- `at` is float64 [B], the time of each request, {same}.\n",
    }
    return _PAGE.format(
        model=model,
        version=__version__,
        lines="\n".join(lines_of(format, encoder.inputs, names, n, unit)),
        index="\n".join(_index(format)),
        needs=_OPEN[format][2],
        suffix="onnx" if onnx else "pt2",
        times="".join(f", `{name}`" for name in encoder.inputs),
        about_times="".join(about[name] for name in encoder.inputs),
        optional="; may be left out" if onnx else "",
        k=k,
        n=n,
        items=len(names),
        d=encoder.model.item_embedding.embedding_dim,
    )


def lines_of(
    format: str, more: list[str], names: list[Any], n: int, unit: str = "seconds"
) -> list[str]:
    """From three names of items to what is recommended after them."""
    importing, opening, _ = _OPEN[format]
    some = json.dumps(names[1:4], ensure_ascii=False)
    clock = [(1.5e9 + 3600 * hour) / SECONDS[unit] for hour in range(len(names[1:4]))]
    lines = [
        "import json",
        importing,
        "import numpy as np",
        "",
        'names = json.load(open("items.json", encoding="utf-8"))',
        "ids = {name: id for id, name in enumerate(names)}",
        f"history = [ids[name] for name in {some}][-{n}:]  # oldest first",
    ]
    given = {"items": "np.array([history])", "lengths": "np.array([len(history)])"}
    if "times" in more:
        lines.append(f"times = {clock!r}[-{n}:]")
        given["times"] = "np.array([times])"
    if "at" in more:
        given["at"] = "np.array([times[-1] + 3600.0])"
    lines.append(f"program = {opening}")
    if format == "onnx":
        lines.insert(-1, "onnxruntime.set_default_logger_severity(3)  # it warns of defaults")
        inputs = ", ".join(f'"{name}": {value}' for name, value in given.items())
        lines += [f"given = {{{inputs}}}", "items, scores = program.run(None, given)"]
    else:
        allowed = f"np.ones((1, {len(names)}), dtype=bool)"
        order = [given["items"], given["lengths"], allowed, *(given[name] for name in more)]
        lines += [
            f"given = [{', '.join(order)}]",
            "items, scores = program(*map(torch.from_numpy, given))",
        ]
    show = "print([(names[item], score) for item, score in zip(items[0, :10], scores[0, :10])])"
    return [*lines, show]


def _index(format: str) -> list[str]:
    """After the lines above."""
    if format == "onnx":
        opening = 'onnxruntime.InferenceSession("vector.onnx").run(None, given)[0]'
    else:
        order = "given[:2] + given[3:]"  # all but what is allowed
        opening = (
            f'torch.export.load("vector.pt2").module()(*map(torch.from_numpy, {order})).numpy()'
        )
    return [
        "import faiss",
        'vectors = np.load("vectors.npy")[1:]  # without padding',
        "index = faiss.IndexHNSWFlat(vectors.shape[1], 32, faiss.METRIC_INNER_PRODUCT)",
        "index.add(vectors)",
        f"vector = {opening}",
        "scores, places = index.search(vector, 10)",
        "print([names[1 + place] for place in places[0]])",
    ]
