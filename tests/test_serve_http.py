"""The HTTP service: a real server process, asked over real connections."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, wait
from fastapi import Request
from server import JSON, Server, same, serving, started, trained

from recbole_pos.cli.main import main
from recbole_pos.config.arguments import ServeArguments
from recbole_pos.errors import UsageError
from recbole_pos.screen import Screen
from recbole_pos.serve.bodies import Refusal
from recbole_pos.serve.recommender import Recommender


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of the same data, and one that reads times."""
    folder = tmp_path_factory.mktemp("serve")
    return [
        trained(folder / "a", "PosSASRec", 1),
        trained(folder / "b", "PosSASRec", 2),
        trained(folder / "c", "TORoPE", 3),
    ]


@pytest.fixture(scope="module")
def server(runs: list[Path]) -> Iterator[Server]:
    with serving(runs[0]) as one:
        yield one


@pytest.fixture(scope="module")
def direct(runs: list[Path]) -> Recommender:
    return Recommender.load(runs[0])


def test_answers(server: Server, direct: Recommender, runs: list[Path]) -> None:
    history = [{"id": "a", "items": ["i1", "i2", "new"]}, {"id": 7, "items": []}]
    asked = {"histories": history, "k": 5, "exclude_seen": True, "boosts": {"i9": 2}}
    status, found = server.post("/recommend", asked)
    assert status == 200 and found["run_dir"] == str(runs[0])
    assert [(x["id"], x["by"], x["unknown"]) for x in found["recommendations"]] == [
        ("a", "model", 1),
        (7, "popularity", 0),
    ]
    same(found["recommendations"], direct, asked)
    asked = {"users": ["u7", "u3", "u7"], "allowed": ["i1", "i2", "i3", 4], "excluded": ["i2"]}
    status, found = server.post("/recommend", asked)
    assert [x["id"] for x in found["recommendations"]] == ["u7", "u3"]
    same(found["recommendations"], direct, asked)
    times = [["2020-01-02T00:00:00Z", "2020-01-01"], [1577923200, 1577836800]]
    dated = [{"items": ["i1", "i2"], "times": some} for some in times]
    status, found = server.post("/recommend", {"histories": dated})
    (one, two) = found["recommendations"]
    assert status == 200 and {**one, "id": 1} == two
    status, found = server.post("/similar", {"items": ["i3", "i1"], "k": 4})
    table = direct.similar(["i3", "i1"], 4)
    asked = {"items": ["i3", "i1"], "k": 4, "allowed": ["i1", "i2", "i4"], "excluded": ["i4"]}
    status, few = server.post("/similar", asked)
    assert [sorted(x["items"]) for x in few["similar"]] == [["i1", "i2"], ["i2"]]
    assert status == 200 and [x["id"] for x in found["similar"]] == ["i3", "i1"]
    assert [name for x in found["similar"] for name in x["items"]] == table["similar"].tolist()
    status, found = server.ask("GET", "/health")
    kept = {"status": "ready", "model": "PosSASRec", "run_dir": str(runs[0]), "items": 40}
    assert status == 200 and kept.items() <= found.items() and found["trained"] <= found["loaded"]


@pytest.mark.parametrize(
    ("status", "message", "method", "path", "body"),
    [
        (404, "GET /recommend/: Not Found", "GET", "/recommend/", None),
        (405, "GET /recommend: Method Not Allowed", "GET", "/recommend", None),
        (400, "Invalid JSON: EOF", "POST", "/recommend", b'{"histories": ['),
        (400, "Invalid JSON: recursion", "POST", "/recommend", b'{"histories": ' + b"[" * 9999),
        (422, "the body: Input should be an object, found []", "POST", "/recommend", []),
        (422, "give histories or users, one of the two", "POST", "/recommend", {"k": 3}),
        (422, "K: Extra inputs are not permitted", "POST", "/recommend", {"users": [], "K": 3}),
        (422, "k: expected 1 to 40, the number", "POST", "/recommend", {"users": ["u1"], "k": 0}),
        (422, "k: Input should be a valid integer, found True", "POST", "/recommend", {"k": True}),
        (422, "k: at most 1,000, found 1001", "POST", "/recommend", {"users": ["u1"], "k": 1001}),
        (422, "users: 1 of 1 have no event", "POST", "/recommend", {"users": ["nobody"]}),
        (422, "histories[1].times: expected one for", "POST", "/recommend",
         {"histories": [["i1"], {"items": ["i1"], "times": []}]}),
        (422, "histories[0].id: expected a name", "POST", "/recommend",
         {"histories": [{"id": 2**64, "items": []}]}),
        (422, "boosts: 'i1': expected a number, found inf", "POST", "/recommend",
         {"users": ["u1"], "boosts": {"i1": float("inf")}}),
        (422, "boosts: 'i1': expected a number, found 1e+300", "POST", "/recommend",
         {"users": ["u1"], "boosts": {"i1": 1e300}}),
        (422, "no item is left to recommend", "POST", "/recommend",
         {"users": ["u1"], "allowed": ["i999"]}),
        (422, "items: List should have at least 1 item", "POST", "/similar", {"items": []}),
        (422, "item 'i999' is not known", "POST", "/similar", {"items": ["i1", "i999"]}),
        (413, "histories: at most 256 in a request", "POST", "/recommend",
         {"histories": [[]] * 257}),
        (413, "histories[1].items: at most 10,000", "POST", "/recommend",
         {"histories": [[], ["i1"] * 10_001]}),
        (413, "the body is longer than 1,048,576 bytes", "POST", "/similar", b" " * 2**22),
        (422, "/nowhere is not a run folder", "POST", "/reload", {"run_dir": "/nowhere"}),
        (422, "not reloaded", "POST", "/reload", {"run_dir": "x" * 300}),
        (422, "not reloaded", "POST", "/reload", {"run_dir": "y/" * 9999}),
        (422, "run folder", "POST", "/reload", {"run_dir": "a\0b"}),
        (422, "run folder", "POST", "/reload", {"run_dir": os.devnull}),
        (422, "allowed", "POST", "/similar", {"items": ["i1"], "allowed": ["i999"]}),
    ],
)  # fmt: skip
def test_refusals(
    server: Server, status: int, message: str, method: str, path: str, body: Any
) -> None:
    found, said = server.ask(method, path, body)
    assert found == status and list(said) == ["error"] and message in said["error"], said
    assert len(said["error"]) < 1000


def test_headers(server: Server) -> None:
    status, said = server.post("/recommend", {"users": ["u1"]}, headers={})
    assert status == 415 and "expected the header Content-Type: application/json" in said["error"]
    status, _ = server.post(
        "/recommend", {"users": ["u1"]}, headers={"Content-Type": "Application/JSON; charset=utf-8"}
    )
    assert status == 200
    for name in ("X-Forwarded-For", "Origin"):  # a proxy's, a browser's: not from this machine
        status, said = server.post("/reload", {}, headers={**JSON, name: "127.0.0.1"})
        assert status == 403 and "--allow_reload" in said["error"]


def test_reloads_lose_no_request(server: Server, runs: list[Path], record_property: Any) -> None:
    """Four clients ask without a pause; each answer is whole, and of the model that it names."""
    models = {str(run): Recommender.load(run) for run in runs}
    history = {"id": "a", "items": ["i1", "i5", "i9"], "times": [1.5e9, 1.5e9 + 60, 1.5e9 + 99]}
    asked = {"histories": [history], "k": 6}
    over, answers, seconds = threading.Event(), [], []

    def client() -> None:
        connection = server.client()
        while not over.is_set():
            began = time.perf_counter()
            try:
                answers.append(server.post("/recommend", asked, client=connection))
            except Exception as error:
                answers.append((0, error))
            seconds.append(time.perf_counter() - began)

    clients = [threading.Thread(target=client) for _ in range(4)]
    for one in clients:
        one.start()
    try:
        for run in (runs[1], runs[2], runs[0]):
            status, found = server.post("/reload", {"run_dir": str(run)})
            assert status == 200 and found["run_dir"] == str(run)
        status, said = server.post("/reload", {"run_dir": str(runs[0].parent)})
        assert status == 422 and "not reloaded, nothing has changed" in said["error"]
        server.process.send_signal(signal.SIGHUP)
        done = 'recbole_pos_reloads_total{outcome="done"} 4.0'
        wait(lambda: done in server.ask("GET", "/metrics")[1])
    finally:
        over.set()
        for one in clients:
            one.join()
    assert {status for status, _ in answers} == {200}, [x for x in answers if x[0] != 200][:3]
    assert {found["run_dir"] for _, found in answers} == set(models)
    for found in {found["run_dir"]: found for _, found in answers}.values():
        same(found["recommendations"], models[found["run_dir"]], asked)
    by_run = {(f["run_dir"], str(f["recommendations"])) for _, f in answers}
    assert len(by_run) == len(models)  # one answer a model, always the same
    p50, p99 = np.percentile(seconds, [50, 99]) * 1000
    record_property("fuzz", f"{len(answers):,} requests in 4 reloads: {p50:.0f}, {p99:.0f} ms")
    metrics = server.ask("GET", "/metrics")[1]
    assert 'recbole_pos_requests_total{path="/recommend",status="200"}' in metrics
    assert "recbole_pos_histories_total" in metrics and "request_seconds_bucket" in metrics


def test_sigterm_ends_it_when_requests_are_answered(runs: list[Path]) -> None:
    body = json.dumps({"users": ["u1"]}).encode()
    head = f"POST /recommend HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\
Content-Length: {len(body)}\r\n\r\n".encode()
    with serving(runs[0], "--max_body=99") as server:
        assert server.post("/recommend", b" " * 100)[0] == 413
        with socket.create_connection(("127.0.0.1", server.port)) as under_way:
            under_way.sendall(head + body[:3])
            server.ask("GET", "/health")  # by now, it is read
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            under_way.sendall(body[3:])
            assert under_way.recv(65536).startswith(b"HTTP/1.1 200")
        assert server.process.wait(60) == 0


SIGNALLED = """
import os, sys

class Signals:
    def find_spec(self, name, path=None, target=None):
        if name == "uvicorn":
            os.kill(os.getpid(), int(sys.argv[1]))

sys.meta_path.insert(0, Signals())
from recbole_pos.cli.main import main

sys.exit(main(["serve", "no run folder", "--port=0"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_starts_ends_it_with_0(number: int) -> None:
    command = [sys.executable, "-c", SIGNALLED, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_what_cannot_be_served(runs: list[Path], tmp_path: Path, capsys: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(runs[0]), f"--port={port}"]) == 2
    assert f"cannot listen on 127.0.0.1, port {port}" in capsys.readouterr().err
    assert main(["serve", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    assert main(["serve", str(runs[0]), "--threads=0"]) == 2
    assert "--threads must be at least 1, found 0" in capsys.readouterr().err
    for name in ("config.yaml", "checkpoint.pt"):
        (tmp_path / name).write_bytes(
            (runs[0] / name).read_bytes()[: 10**3 if "pt" in name else None]
        )
    process, line = started(tmp_path)  # the address answers before the model is read
    said, _ = process.communicate()
    assert line.startswith("http://") and process.returncode == 2
    assert said.startswith("error: ") and "Traceback" not in said


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "recbole_pos.serve.http", raising=False)
    assert main(["serve", os.devnull]) == 2
    said = capsys.readouterr().err
    assert said == "error: serve: uvicorn is not installed; pip install 'recbole-pos[serve]'\n"


def test_not_now(runs: list[Path]) -> None:
    """While the first model is read, and where too many wait."""
    from recbole_pos.serve.http import Service

    service = Service(runs[0], ServeArguments(max_waiting=1), Screen(False))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"users": ["u1"]}'}

    def ask() -> int:
        scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
        try:
            return asyncio.run(service.recommend(Request(scope, receive))).status_code
        except Refusal as error:
            return error.status

    assert ask() == asyncio.run(service.health()).status_code == 503
    service.live.load()
    assert ask() == asyncio.run(service.health()).status_code == 200
    service.waiting = 1
    assert ask() == 503
    with service.live._loading, pytest.raises(Refusal) as refused:
        service.live.load()
    assert refused.value.status == 409
    with pytest.raises(UsageError):
        service.live.load("nowhere")
    assert service.live.run_dir == str(runs[0])
