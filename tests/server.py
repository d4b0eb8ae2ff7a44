"""A server in a process of its own, and its clients."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from conftest import PATIENCE, SMALL, make_log, wait, write_atomic

import recbole_pos
from recbole_pos.serve.recommender import Recommender

JSON = {"Content-Type": "application/json"}


@dataclass
class Server:
    """One that runs; ``output`` is what it printed before it was ready."""

    process: subprocess.Popen
    port: int
    message: str

    def client(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        client: http.client.HTTPConnection | None = None,
    ) -> tuple[int, Any]:
        """Status and content: json read, unless it is something else. Bytes go as they are."""
        client = client or self.client()
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        client.request(method, path, body, JSON if headers is None else headers)
        answer = client.getresponse()
        content = answer.read()
        if answer.headers.get_content_type() == "application/json":
            return answer.status, json.loads(content)
        return answer.status, content.decode()

    def post(self, path: str, body: Any = None, **more: Any) -> tuple[int, Any]:
        return self.ask("POST", path, body, **more)


def started(run_dir: Path | str, *options: str) -> tuple[subprocess.Popen, str]:
    """The process, and the first line that it printed."""
    command = [sys.executable, "-m", "recbole_pos.cli.main", "serve", "--port=0", str(run_dir)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen([*command, *options], **pipes)
    assert process.stdout is not None
    return process, process.stdout.readline()


@contextmanager
def serving(run_dir: Path | str, *options: str) -> Iterator[Server]:
    """One that is ready; ended with SIGTERM, if it still runs, which must go well."""
    process, line = started(run_dir, *options)
    try:
        assert line.startswith("http://127.0.0.1:"), line
        server = Server(process, int(line.split(":")[2].split()[0]), line)
        wait(lambda: server.ask("GET", "/health")[0] == 200)
        yield server
        process.terminate()
        message, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0 and "Traceback" not in message, message
    finally:
        process.kill()
        process.wait()


def trained(run_dir: Path, model: str = "PosSASRec", seed: int = 1) -> Path:
    """The folder of a small run, of the same data whatever the model."""
    data = write_atomic(make_log(), run_dir.parent)
    options = {**SMALL, "epochs": 1, "data_path": str(data), "seed": seed}
    recbole_pos.run(model, "tiny", None, options, run_dir=run_dir, verbose=False)
    return run_dir


def same(answer: list[dict], trained: Recommender, asked: dict[str, Any]) -> None:
    """The answer is what the library says."""
    table = trained.recommend(**asked)
    for one in answer:
        mine = table[table["id"] == one["id"]]
        assert mine["item"].tolist() == one["items"]
        np.testing.assert_allclose(mine["score"], one["scores"], rtol=1e-5, atol=1e-6)
        assert set(mine["by"]) <= {one["by"]}
