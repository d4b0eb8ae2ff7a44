"""Checkpoints: plain tensors and values in one file, read without running its content.

RecBole's trainer pickles its config into checkpoints, which today's torch rightly refuses to load.
Here are tensors and plain values, with all random states, so that a resumed run ends with the same
bits. A file is read with ``weights_only=True`` after a look at its bytes (``torch_file.py``), and
nothing of it is used before it was compared with :data:`LAYOUT` and, of weights and optimiser, with
those of the model at hand (``state.py``).
"""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recbole_pos.data.identity import changes
from recbole_pos.errors import CheckpointError
from recbole_pos.experiment.torch_file import damaged, require_archive
from recbole_pos.files import whole
from recbole_pos.plain import to_plain
from recbole_pos.values import is_number, is_whole, shown

FORMAT = "recbole-pos/1"


@dataclass
class Progress:
    """Where a training stands; with weights, optimiser and random state it is the checkpoint."""

    next_epoch: int = 0
    stopped: bool = False  # early stopping said so
    steps_without_gain: int = 0
    best_epoch: int | None = None
    best_score: float | None = None
    best_result: dict[str, float] | None = None
    training_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    trained_targets: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


# A rule says in words what it wants, if a value is not that.
Rule = Callable[[Any], str]


@dataclass(frozen=True)
class Maybe:
    """None, or as ``like``."""

    like: Any


@dataclass(frozen=True)
class Each:
    """A mapping of any size, keys of a type and values as ``like``."""

    key: type
    like: Any


def difference(found: Any, like: Any, place: str) -> str | None:
    """Where ``found`` first differs from what is expected, in words; None if it does not.

    Args:
        found: a tree of plain values and tensors.
        like: a rule; ``Maybe`` or ``Each``; a mapping (of these keys), a list of one (of any
            length) or a tuple (as long); any other value stands for its type.
        place: name of ``found``, such as ``optimizer.state``.
    """
    wanted, inner = "", []
    match like:
        case Maybe():
            return None if found is None else difference(found, like.like, place)
        case Each():
            wrong = isinstance(found, dict) and [k for k in found if type(k) is not like.key]
            wanted = "" if isinstance(found, dict) and not wrong else _mapping_of(like.key)
            inner = [] if wanted else [(key, value, like.like) for key, value in found.items()]
        case dict():
            if not isinstance(found, dict):
                wanted = "a mapping"
            elif odd := sorted(map(_name, like.keys() ^ found.keys())):
                return f"{place} lacks, or has unknown, {', '.join(odd[:3])}"
            else:
                inner = [(key, found[key], value) for key, value in like.items()]
        case list():
            wanted = "" if isinstance(found, (list, tuple)) else "a list"
            inner = [] if wanted else [(i, value, like[0]) for i, value in enumerate(found)]
        case tuple():
            fits = isinstance(found, tuple) and len(found) == len(like)
            wanted = "" if fits else f"a tuple of {len(like)}"
            inner = [] if wanted else list(zip(range(len(like)), found, like, strict=True))
        case Tensor():
            wanted = tensor(like)(found)
        case _ if callable(like):
            wanted = like(found)
        case float():
            wanted = "" if isinstance(found, float) or is_number(found) else "a number"
        case _:
            wanted = "" if type(found) is type(like) else f"a value of type {type(like).__name__}"
    if wanted:
        size = f"a tensor {list(found.shape)} of {found.dtype}" if isinstance(found, Tensor) else ""
        return f"{place}: expected {wanted}, found {size or ' '.join(shown(found).split())}"
    parts = (difference(value, rule, f"{place}.{_name(key)}") for key, value, rule in inner)
    return next(filter(None, parts), None)


def _mapping_of(key: type) -> str:
    return f"a mapping with keys of type {key.__name__}"


def _name(key: Any) -> str:
    return key if isinstance(key, str) and len(key) < 100 and key.isprintable() else shown(key)


def number(low: float = -math.inf, high: float = math.inf, whole: bool = False) -> Rule:
    """A finite number within bounds."""
    wanted = "a whole number" if whole else "a finite number"
    wanted += f" of at least {low:g}" if low > -math.inf else ""
    wanted += f" and at most {high:g}" if high < math.inf else ""
    is_one = is_whole if whole else is_number
    return lambda found: "" if is_one(found) and low <= found <= high else wanted


def tensor(like: Tensor, low: float = -math.inf) -> Rule:
    """A tensor of the shape and type of ``like``; of finite numbers, if that is."""

    def wanted(found: Any) -> str:
        if not isinstance(found, Tensor) or (found.shape, found.dtype) != (like.shape, like.dtype):
            return f"a tensor {list(like.shape)} of {like.dtype}"
        if not bool(found.isfinite().all()) and bool(like.isfinite().all()):
            return "finite numbers"
        return f"no value below {low:g}" if low > -math.inf and bool((found < low).any()) else ""

    return wanted


def any_tensor(found: Any) -> str:
    """A tensor."""
    return "" if isinstance(found, Tensor) else "a tensor"


def _vector(dtype: torch.dtype, length: int | None = None) -> Rule:
    def wanted(found: Any) -> str:
        fits = isinstance(found, Tensor) and found.dim() == 1 and found.dtype == dtype
        fits = fits and found.is_contiguous() and length in (None, len(found))
        return "" if fits else f"a vector of {length or ''} {dtype}"

    return wanted


def _plain(tensors: bool) -> Rule:
    """Anything that yaml could hold, not nested without end; or tensors, too."""

    def fits(value: Any, depth: int) -> bool:
        if isinstance(value, dict):
            return depth > 0 and all(fits(v, depth - 1) for v in value.values())
        if isinstance(value, (list, tuple)):
            return depth > 0 and all(fits(v, depth - 1) for v in value)
        return tensors or not isinstance(value, Tensor)

    return lambda found: "" if fits(found, 20) else "plain values, nested at most 20 deep"


_COUNT, _METRICS = number(0, 2**53, whole=True), Each(str, 0.0)
_BYTES = _vector(torch.uint8)
_WEIGHTS = {"state_dict": Each(str, any_tensor), "other": Each(str, _plain(tensors=True))}
# What every checkpoint of a run holds, whatever the model.
LAYOUT: dict[str, Any] = {
    "data": Maybe("digest"),
    "fields": Maybe(Each(str, "digest")),
    "config": Each(str, _plain(tensors=False)),
    "progress": {
        "next_epoch": _COUNT,
        "stopped": False,
        "steps_without_gain": _COUNT,
        "best_epoch": Maybe(_COUNT),
        "best_score": Maybe(number()),
        "best_result": Maybe(_METRICS),
        "training_seconds": number(0),
        "evaluation_seconds": number(0),
        "trained_targets": _COUNT,
        "history": [
            {
                "epoch": _COUNT,
                "loss": number(),
                "valid": Maybe(_METRICS),
                "seconds": number(0),
                "targets_per_second": number(0),
            }
        ],
    },
    "weights": _WEIGHTS,
    "best_weights": Maybe(_WEIGHTS),
    "optimizer": {
        "state": Each(int, Each(str, _plain(tensors=True))),
        "param_groups": [Each(str, _plain(tensors=True))],
    },
    "scaler": Each(str, number()),
    "random": {
        "torch": _BYTES,
        "cuda": [_BYTES],
        # how much of its words is used; numpy would read beyond
        "numpy": ("", _vector(torch.int64, 624), number(0, 624, whole=True), _COUNT, number()),
        "python": (_COUNT, [_COUNT], Maybe(number())),
    },
    "loader": Maybe(_BYTES),
}
_SINCE = ("data", "fields")  # parts that earlier versions did not write


def save(path: str | Path, state: dict[str, Any]) -> None:
    """Write a checkpoint so that at any moment either the old file or the new one is there.

    Args:
        path: the file.
        state: tensors and plain values; numpy arrays and scipy sparse matrices are converted.

    Raises:
        TypeError: for anything else, which would have to be pickled.
        UsageError: if its folder is not there.
        StorageError: if there is no room for it.
    """
    with whole(path, text=False) as file:
        torch.save({"format": FORMAT, **to_plain(state)}, file)


def load(path: str | Path, required: Sequence[str] = ()) -> dict[str, Any]:
    """Read a checkpoint with ``weights_only=True``, onto the CPU.

    Raises:
        CheckpointError: if the file is missing, damaged, lacks one of ``required`` or has it in
            another form than ``LAYOUT``, holds a pickled object (nothing in it is run), or was not
            written by this package.
    """
    path = Path(path)
    state = _read(path)
    # earlier versions kept best weights that were not the newest in a second file meanwhile
    if (name := state.pop("best_file", None)) is not None and (
        not required or "best_weights" in required
    ):
        require({"best_file": name}, {"best_file": ""}, path)
        file = path.with_name(Path(name).name)
        if not file.is_file():
            raise CheckpointError(
                f"{path} lacks its best weights, which are in {_name(file.name)} beside it: copy "
                "the whole folder"
            )
        best = _read(file)
        if best.get("token") != name.rpartition("-")[2]:
            raise CheckpointError(f"{file} has best weights of another checkpoint than {path}")
        state["best_weights"] = best.get("weights")
    if missing := [key for key in required if key not in state]:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}")
    parts = {*required, *(key for key in _SINCE if key in state)}
    require(state, {key: like for key, like in LAYOUT.items() if key in parts}, path)
    return state


def old_best_files(path: Path) -> list[Path]:
    """Files of best weights that an earlier version may have left beside a checkpoint."""
    return sorted(file for file in path.parent.iterdir() if is_old_best_file(file.name, path))


def is_old_best_file(name: str, path: Path) -> bool:
    """Whether a file of this name is one of them."""
    return name.startswith(f"{path.name}.best-")


def _read(path: Path) -> dict[str, Any]:
    require_archive(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise damaged(path, error) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by this package (expected {FORMAT})")
    return state


def copy(source: Path, target: Path) -> None:
    """A checkpoint elsewhere, as one file; what is there is replaced at once.

    Raises:
        CheckpointError: if there is none, or it is damaged.
        StorageError: if it cannot be written.
    """
    if old_best_files(source):
        save(target, load(source))
        return
    with whole(target, text=False) as file, source.open("rb") as given:
        shutil.copyfileobj(given, file)


def require(state: dict[str, Any], expected: dict[str, Any], path: str | Path) -> None:
    """Refuse parts of a checkpoint that are not as expected.

    Args:
        state: of the checkpoint.
        expected: its parts by name, see :func:`difference`.
        path: the checkpoint's, for the message.

    Raises:
        CheckpointError: naming the first part that differs, such as optimizer.state.0.exp_avg.
    """
    for key, like in expected.items():
        if wrong := difference(state[key], like, key):
            raise CheckpointError(f"{path} cannot be used: {wrong}")


def require_same_data(state: dict[str, Any], data: dict[str, Any], path: str | Path) -> None:
    """Refuse weights that were trained on other data, or under another split.

    Args:
        state: of the checkpoint.
        data: ``identity`` of the dataset.
        path: the checkpoint's, for the message.

    Raises:
        CheckpointError: if they differ in events or split, or in a field that both have loaded.
    """
    if changed := changes(state, data):
        raise CheckpointError(
            f"{path} was trained on other data or another split: {changed} have changed since, so "
            "its weights do not fit"
        )


def random_state() -> dict[str, Any]:
    """The state of every random number generator training uses."""
    numpy: Any = np.random.get_state()  # five values, or by other types a mapping
    kind, keys, position, has_gauss, cached = numpy
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
        "python": (version, internal, gauss),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Inverse of :func:`random_state`."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
    np.random.set_state(_numpy_state(state))
    random.setstate(_python_state(state))


def try_random_state(state: dict[str, Any]) -> None:
    """Raises what a generator says of a state that is none; changes none that anybody uses."""
    torch.Generator().set_state(state["torch"])
    np.random.RandomState().set_state(_numpy_state(state))
    random.Random().setstate(_python_state(state))


def _numpy_state(state: dict[str, Any]) -> tuple:
    kind, keys, *rest = state["numpy"]
    return kind, keys.cpu().numpy().astype(np.uint32), *rest


def _python_state(state: dict[str, Any]) -> tuple:
    version, internal, gauss = state["python"]
    return version, tuple(internal), gauss
