"""The whole way of a shop, as examples/shop/run.sh has it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "shop"


@pytest.mark.long  # each step has tests of its own
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="the script asks the service by curl")
def test_the_whole_way(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PORT": str(port),
        "CUSTOMERS": "150",
    }
    command = ["bash", str(EXAMPLE / "run.sh"), "--epochs=1", "--hidden_size=16"]
    done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True)
    assert not done.returncode, done.stdout[-3000:] + done.stderr[-3000:]
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(answer["recommendations"][0]["items"]) == 3
    kept = json.loads((tmp_path / "dataset" / "shop" / "convert.json").read_text())
    assert kept["lines"]["events"]["dropped"]
    found = pd.read_parquet(tmp_path / "recommendations.parquet")
    assert found.groupby("user_id")["rank"].max().eq(20).all()
    baskets = pd.read_csv(tmp_path / "baskets.csv")
    assert baskets.groupby("id")["by"].first().tolist() == ["model", "popularity"]
    assert set(baskets["item"]) <= set(
        pd.read_parquet(tmp_path / "live" / "known.parquet")["token"]
    )
    assert "items 1, which the model does not know" in done.stdout
    assert "live was trained: 1" in done.stderr
    assert (tmp_path / "exported" / "README.md").is_file()
