"""The HTTP service: a real server process, asked over real connections."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, wait
from fastapi import Request
from server import JSON, Server, same, serving, trained

from recbole_pos.cli.main import main
from recbole_pos.config.arguments import ServeArguments
from recbole_pos.errors import UsageError
from recbole_pos.reporter import Reporter
from recbole_pos.serve.bodies import Refusal
from recbole_pos.serve.recommender import Recommender

pytestmark = pytest.mark.slow


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
    ("status", "field", "path", "body"),
    [
        (404, "GET /recommend/", "/recommend/", None),
        (400, "Invalid JSON", "/recommend", b'{"histories": ' + b"[" * 9999),
        (422, "K: ", "/recommend", {"users": [], "K": 3}),
        (422, "k: ", "/recommend", {"users": ["u1"], "k": 0}),
        (422, "k: ", "/recommend", {"users": ["u1"], "k": 1001}),
        (422, "users: ", "/recommend", {"users": ["no one"]}),
        (422, "histories[1].times: ", "/recommend",
         {"histories": [["i1"], {"items": ["i1"], "times": []}]}),
        (422, "histories[0].items[1]: ", "/recommend", {"histories": [["i1", None]]}),
        (422, "boosts: ", "/recommend", {"users": ["u1"], "boosts": {"i1": float("inf")}}),
        (422, "allowed: ", "/similar", {"items": ["i1"], "allowed": ["i999"]}),
        (413, "histories: ", "/recommend", {"histories": [[]] * 257}),
        (413, "the body is longer", "/similar", b" " * 2**22),
        (422, "not reloaded", "/reload", {"run_dir": "/nowhere"}),
        (422, "not reloaded", "/reload", {"run_dir": "x" * 300}),
        (422, "not reloaded", "/reload", {"run_dir": "a\0b"}),
    ],
)  # fmt: skip
def test_refusals(server: Server, status: int, field: str, path: str, body: Any) -> None:
    found, output = server.ask("POST" if body else "GET", path, body)
    assert found == status and list(output) == ["error"], output
    assert output["error"].startswith(field) and len(output["error"]) < 1000


def test_headers(server: Server) -> None:
    status, output = server.post("/recommend", {"users": ["u1"]}, headers={})
    assert status == 415 and "expected the header Content-Type: application/json" in output["error"]
    status, _ = server.post(
        "/recommend", {"users": ["u1"]}, headers={"Content-Type": "Application/JSON; charset=utf-8"}
    )
    assert status == 200
    for name in ("X-Forwarded-For", "Origin"):  # a proxy's, a browser's: not from this machine
        status, output = server.post("/reload", {}, headers={**JSON, name: "127.0.0.1"})
        assert status == 403 and "--allow_reload" in output["error"]


def test_two_models_share_the_ids(
    runs: list[Path], direct: Recommender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name, or by the hash of the id: the same model at all times; metrics by name."""
    monkeypatch.setenv("RECBOLE_POS_SHARES", "A=0.7 B=0.3")
    models = {"A": direct, "B": Recommender.load(runs[1])}
    with serving(f"A={runs[0]}", f"B={runs[1]}") as server:
        histories = [{"id": f"u{n}", "items": ["i1", "i2"]} for n in range(200)]
        asked = {"histories": [*histories, ["i3"]], "k": 3}
        status, found = server.post("/recommend", asked)
        answers = found["recommendations"]
        assert status == 200 and found["models"] == {"A": str(runs[0]), "B": str(runs[1])}
        assert sorted(str(x["id"]) for x in answers) == sorted(
            [*(h["id"] for h in histories), "200"]
        )
        assert next(x["model"] for x in answers if x["id"] == 200) == "A"  # it has no id
        chosen = {x["id"]: x["model"] for x in answers}
        assert 30 < sum(name == "B" for name in chosen.values()) < 90
        by_id = {history["id"]: history for history in histories}
        for one in (x for x in answers[:20] if x["id"] in by_id):
            same([one], models[one["model"]], {"histories": [by_id[one["id"]]], "k": 3})
        for n in (3, 50):
            (one,) = server.post("/recommend", {"histories": [histories[n]]})[1]["recommendations"]
            assert one["model"] == chosen[f"u{n}"]
        status, found = server.post("/recommend", {"users": ["u7", "u3"], "model": "B"})
        assert {one["model"] for one in found["recommendations"]} == {"B"}
        same(found["recommendations"], models["B"], {"users": ["u7", "u3"]})
        for path, body in (
            ("/recommend", {"users": ["u1"], "model": "C"}),
            ("/reload", {"run_dir": str(runs[2])}),
        ):
            status, found = server.post(path, body)
            assert status == 422 and found["error"].startswith("model: "), found
        status, found = server.post("/reload", {"run_dir": str(runs[2]), "model": "B"})
        assert status == 200 and found["models"]["B"]["model"] == "TORoPE"
        metrics = server.ask("GET", "/metrics")[1]
        assert 'recbole_pos_scoring_seconds_count{model="B"}' in metrics
        assert 'recbole_pos_reloads_total{model="B",outcome="done"} 1.0' in metrics
        assert server.post("/similar", {"items": ["i3"], "model": "A"})[0] == 200


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
        status, output = server.post("/reload", {"run_dir": str(runs[0].parent)})
        assert status == 422 and "not reloaded, nothing has changed" in output["error"]
        server.process.send_signal(signal.SIGHUP)
        done = 'recbole_pos_reloads_total{model="default",outcome="done"} 4.0'
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


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM]
)
def test_a_signal_while_it_starts_ends_it_with_0(number: int) -> None:
    command = [sys.executable, "-c", SIGNALLED, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "recbole_pos.serve.http", raising=False)
    assert main(["serve", os.devnull]) == 2
    output = capsys.readouterr().err
    assert output == "error: serve: uvicorn is not installed; pip install 'recbole-pos[serve]'\n"


def test_not_now(runs: list[Path]) -> None:
    """While the first model is read, and where too many wait."""
    from recbole_pos.serve.http import Service

    service = Service({"one": runs[0]}, ServeArguments(max_waiting=1), Reporter(False))
    (holder,) = service.holders.by_name.values()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"users": ["u1"]}'}

    def ask() -> int:
        scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
        try:
            return asyncio.run(service.recommend(Request(scope, receive))).status_code
        except Refusal as error:
            return error.status

    assert ask() == asyncio.run(service.health()).status_code == 503
    holder.load()
    assert ask() == asyncio.run(service.health()).status_code == 200
    service.waiting = 1
    assert ask() == 503
    with holder._loading, pytest.raises(Refusal) as refused:
        holder.load()
    assert refused.value.status == 409
    with pytest.raises(UsageError):
        holder.load("nowhere")
    assert holder.run_dir == str(runs[0])


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
    assert main(["serve", str(tmp_path), "--port=0"]) == 2
    out, error = capsys.readouterr()
    assert out.startswith("http://")  # the address answers before the model is read
    assert error.startswith("error: ") and "Traceback" not in error


def valid(rng: random.Random) -> dict[str, Any]:
    """A request that must be answered; items up to i49, of which i40 and later are unknown."""

    def items(most: int) -> list[Any]:
        return [f"i{rng.randrange(50)}" for _ in range(rng.randrange(most))]

    people = []
    for number in range(rng.randrange(5)):
        one: dict[str, Any] = {"items": items(10_000 if rng.random() < 0.02 else 30)}
        if rng.random() < 0.5:
            one["times"] = [rng.choice([0, -1e18, 1.5e9, 5]) for _ in one["items"]]
        people.append({"id": f"p{number}", **one} if rng.random() < 0.5 else one)
    asked: dict[str, Any] = {"histories": people, "k": rng.randrange(1, 41)}
    if rng.random() < 0.3:
        asked = {"users": [f"u{rng.randrange(60)}" for _ in range(rng.randrange(1, 5))], "k": 3}
    if rng.random() < 0.5:
        asked["exclude_seen"] = rng.choice([True, False, None])
    if rng.random() < 0.3:
        asked["allowed"] = [*items(20), "i1"]
        asked["excluded"] = [name for name in items(20) if name != "i1"]
    if rng.random() < 0.3:
        asked["boosts"] = {name: rng.uniform(-9, 9) for name in items(5)}
    return asked


ODD = (None, True, -1, 0, 1.5, 2**70, 10**400, float("nan"), float("inf"), "", "i1", "\x00", "é😀")
ODD = (*ODD, [], {}, [[]], [None], {"items": 1}, {"items": ["i1"], "times": [float("nan")]}, [1e99])


def damaged(rng: random.Random, asked: dict[str, Any]) -> bytes:
    """A request that may be wrong in values, names, types, json or letters."""
    for _ in range(rng.randrange(1, 3)):
        place: Any = asked
        while True:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            key = rng.choice([*keys, "odd"] if isinstance(place, dict) else list(keys) or [0])
            inside = place[key] if key in keys else None
            if not (isinstance(inside, (dict, list)) and inside and rng.random() < 0.7):
                break
            place = inside
        if isinstance(place, dict) or len(place):
            place[key] = copy.deepcopy(rng.choice(ODD))
    text = bytearray(json.dumps(asked, ensure_ascii=rng.random() < 0.5).encode())
    if rng.random() < 0.3:
        at = rng.randrange(len(text))
        deep = b"[" * rng.choice([100, 100_000])
        text[at : at + rng.randrange(3)] = rng.choice(
            [b"", b"\xff", b'"', b"\\ud800", b"1e9", deep]
        )
    return bytes(text)


@pytest.mark.parametrize("cases", [200, pytest.param(2000, marks=pytest.mark.long)])
def test_nothing_that_is_sent_breaks_it(
    server: Server, direct: Recommender, cases: int, record_property: Any
) -> None:
    rng = random.Random(cases)
    catalogue, counts = set(direct.items), dict.fromkeys((200, 400, 404, 405, 413, 415, 422), 0)
    client = server.client()
    for case in range(cases):
        asked = valid(rng)
        whole = case % 4 == 0
        body = json.dumps(asked).encode() if whole else damaged(rng, asked)
        path = "/recommend" if whole or rng.random() < 0.9 else rng.choice(["/similar", "/x%00"])
        status, found = server.post(path, body, client=client)
        counts[status] += 1
        if status != 200:
            assert not whole and list(found) == ["error"] and "Traceback" not in found["error"]
            continue
        sent = json.loads(body)
        for one in found.get("recommendations", ()):
            allowed = catalogue & set(map(str, sent.get("allowed") or catalogue))
            assert set(one["items"]) <= allowed - set(map(str, sent.get("excluded") or ()))
        if whole:
            same(found["recommendations"], direct, sent)
    assert counts[200] > cases / 4 and counts[400] and counts[422]
    record_property("fuzz", f"{cases:,} requests: {counts}")


RAW = (
    b"POST /recommend HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /recommend HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nContent-Length: 3\r\n\r\n{}",
    b"POST /recommend HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    b"Content-Type: application/json\r\n\r\nzz\r\n",
    b"POST /recommend HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: 999\r\n\r\n{}",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET / HTTP/1.1\r\n\xff\xff: \x00\r\n\r\n",
    b"\r\n" * 1000,
)


def test_what_is_no_http(server: Server) -> None:
    """Answered with 4xx, if at all; the next one is answered as ever."""
    for raw in RAW:
        answer = send_raw(server, raw)
        assert not answer or answer.startswith(b"HTTP/1.1 4"), answer
        assert b"Traceback" not in answer and server.ask("GET", "/health")[0] == 200


def send_raw(server: Server, raw: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(raw)
        sock.shutdown(socket.SHUT_WR)
        answer = b""
        with suppress(ConnectionResetError):
            while part := sock.recv(65536):
                answer += part
    return answer


def test_sigterm_ends_it_when_requests_are_answered(server: Server) -> None:
    body = json.dumps({"users": ["u1"]}).encode()
    head = f"POST /recommend HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\
Content-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port)) as under_way:
        under_way.sendall(head + body[:3])
        server.ask("GET", "/health")  # by now, it is read
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        under_way.sendall(body[3:])
        assert under_way.recv(65536).startswith(b"HTTP/1.1 200")
    assert server.process.wait(60) == 0
