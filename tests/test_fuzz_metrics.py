"""metrics.jsonl with any byte another: it can be drawn, or its line is named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from recbole_pos.errors import UsageError
from recbole_pos.inspect.run_pictures import draw_curves, read_metrics

METRIC = "ndcg@10"


def line(epoch: int) -> bytes:
    valid = {"hit@10": 0.1, METRIC: 0.1 * epoch} if epoch % 2 else None
    return json.dumps({"epoch": epoch, "loss": 4.0 - epoch, "valid": valid}).encode() + b"\n"


def test_any_byte_may_be_another(tmp_path: Path, monkeypatch, request, record_property) -> None:
    """Flipped, cut out, doubled: lines that can be drawn, or an error that names file and line."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figure.draw_without_rendering())
    rng, file = np.random.default_rng(0), tmp_path / "metrics.jsonl"
    whole = b"".join(map(line, range(5)))
    refused, rounds = 0, 5000 if request.config.getoption("--fuzz") else 200
    for number in range(rounds):
        content = bytearray(whole)
        at = int(rng.integers(len(content)))
        piece = (rng.bytes(1), b"", bytes(content[at : at + 9]) * 2)[int(rng.integers(3))]
        content[at : at + 1] = piece
        file.write_bytes(content)
        try:
            history, note = read_metrics(file, METRIC)
        except UsageError as error:
            refused += 1
            assert f"{file}, line " in str(error)
            continue
        if number % 20 == 0:
            draw_curves(history, METRIC, True, ("a", note), tmp_path / "curves.png")
    assert 0 < refused < rounds
    record_property("fuzz", f"{rounds} damaged metrics.jsonl: {refused} UsageError, the rest read")
