"""The epochs of a run as metrics.jsonl tells them, and which of them is the best."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from recbole.utils import early_stopping

from recbole_pos.errors import UsageError

HALF_A_LINE = "metrics.jsonl ends in half a line, which is left out"
MANY = 1e100  # of such a size no loss is: drawing it would overflow


def read_metrics(file: Path, metric: str) -> tuple[list[dict[str, Any]], str]:
    """Epochs with their loss and, where they were validated, the metric.

    A last line that was not written to its end, as by a process that was killed, is left out.

    Args:
        file: metrics.jsonl of a run folder.
        metric: name of the validation metric, such as ``ndcg@10``.

    Returns:
        Lines in the order of their epochs, and a word about what was left out, or nothing.

    Raises:
        UsageError: if there is no whole line, or if one is not what a run writes; names file and
            line.
    """
    try:
        content = file.read_bytes() if file.exists() else b""
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror or error}") from error
    lines = content.split(b"\n")
    note = ""
    if len(lines) > 1 and not _is_whole(lines[-1]):  # a line that is written has its end
        lines.pop()
        note = HALF_A_LINE
        logging.getLogger(__name__).warning("%s: %s", file.parent, note)
    history: list[dict[str, Any]] = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = _checked(_parsed(text), metric)
            if history and line["epoch"] <= history[-1]["epoch"]:
                raise ValueError(f"epoch {line['epoch']} comes after {history[-1]['epoch']}")
        except ValueError as error:
            raise UsageError(
                f"{file}, line {number}: {error}. `recbole-pos run --resume {file.parent}` writes "
                "the file anew from the checkpoint"
            ) from error
        history.append(line)
    if not history:
        raise UsageError(f"{file.parent} has no finished epoch yet: no line in {file.name}")
    return history, note


def _is_whole(text: bytes) -> bool:
    try:
        return not text.strip() or isinstance(_parsed(text), dict)
    except ValueError:
        return False


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError("this is no json") from error


def _checked(line: Any, metric: str) -> dict[str, Any]:
    if not isinstance(line, dict):
        raise ValueError(f"expected an object, found {_seen(line)}")
    for key in ("epoch", "loss", "valid"):
        if key not in line:
            raise ValueError(f"{key} is missing")
    epoch, valid = line["epoch"], line["valid"]
    if type(epoch) is not int or not 0 <= epoch < 2**31:
        raise ValueError(f"epoch: expected a whole number from 0 on, found {_seen(epoch)}")
    _number(line["loss"], "loss")
    if not (valid is None or isinstance(valid, dict)):
        raise ValueError(f"valid: expected an object or null, found {_seen(valid)}")
    if valid and metric not in valid:
        raise ValueError(f"valid: {metric} is missing")
    if valid:
        _number(valid[metric], f"valid: {metric}")
    return line


def _number(value: Any, name: str) -> None:
    right = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not right or not -MANY < value < MANY:
        raise ValueError(f"{name}: expected a number, found {_seen(value)}")


def _seen(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def best_epoch(scores: Iterable[tuple[int, float]], bigger: bool) -> int | None:
    """The epoch that training keeps, by the rule it stops by (of equal ones the latest).

    Args:
        scores: of the validated epochs in their order.
        bigger: whether more is better, ``valid_metric_bigger`` of the configuration.
    """
    kept, best = None, -math.inf if bigger else math.inf
    for epoch, score in scores:
        best, _, _, improved = early_stopping(score, best, 0, 0, bigger)
        kept = epoch if improved else kept
    return kept
