"""The HTTP service: a server process, asked over real connections."""

from __future__ import annotations

import asyncio
import builtins
import http.client
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, fork, wait
from fastapi import Request

from recbole_pos.cli.main import main
from recbole_pos.config.arguments import ServeArguments
from recbole_pos.errors import UsageError
from recbole_pos.reporter import Reporter
from recbole_pos.serve.bodies import Refusal
from recbole_pos.serve.recommender import Recommender

pytestmark = pytest.mark.slow
JSON = {"Content-Type": "application/json"}


@dataclass
class Server:
    process: Any
    port: int

    def client(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def ask(
        self, path: str, body: Any = None, headers: Any = JSON, client: Any = None
    ) -> tuple[int, Any]:
        """Status and content of POST, or of GET without a body: json is read; bytes go as they
        are."""
        client = client or self.client()
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        client.request("GET" if body is None else "POST", path, body, headers)
        answer = client.getresponse()
        content = answer.read().decode()
        is_json = answer.headers.get_content_type() == "application/json"
        return answer.status, json.loads(content) if is_json else content


@contextmanager
def serving(*words: str | Path) -> Iterator[Server]:
    """One that is ready, forked from this process; ended with SIGTERM, which must go well."""
    reader, writer = os.pipe()

    def child() -> None:
        for output in (1, 2):
            os.dup2(writer, output)
        sys.stdout, sys.stderr = (open(output, "w", closefd=False) for output in (1, 2))
        code = main(["serve", "--port=0", *map(str, words)])
        sys.stdout.flush()
        os._exit(code)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    os.close(writer)
    with open(reader) as printed:
        try:
            line = printed.readline()
            assert line.startswith("http://127.0.0.1:"), line
            server = Server(process, int(line.split(":")[2].split()[0]))
            wait(lambda: server.ask("/health")[0] == 200)
            yield server
            process.terminate()
            message = printed.read()
            process.join(PATIENCE)
            assert process.exitcode == 0 and "Traceback" not in message, message
        finally:
            process.kill()
            process.join()


def assert_same(answer: list[dict], trained: Recommender, asked: dict[str, Any]) -> None:
    """The answer is what the library says."""
    table = trained.recommend(**asked)
    for one in answer:
        mine = table[table["id"] == one["id"]]
        assert mine["item"].tolist() == one["items"]
        np.testing.assert_allclose(mine["score"], one["scores"], rtol=1e-5, atol=1e-6)
        assert set(mine["by"]) <= {one["by"]}


@pytest.fixture(scope="module")
def runs(trained: Callable[..., Path]) -> list[Path]:
    """Two models of the same data, and one that reads times."""
    names = ("PosSASRec", "PosSASRec", "TORoPE")
    return [trained(name, seed=seed) for seed, name in enumerate(names)]


@pytest.fixture(scope="module")
def server(runs: list[Path]) -> Iterator[Server]:
    with serving(runs[0]) as one:
        yield one


@pytest.fixture(scope="module")
def direct(runs: list[Path]) -> Recommender:
    return Recommender.load(runs[0])


def test_answers_are_those_of_the_library(
    server: Server, direct: Recommender, runs: list[Path]
) -> None:
    history = [{"id": "a", "items": ["i1", "i2", "new"]}, {"id": 7, "items": []}]
    asked = {"histories": history, "k": 5, "exclude_seen": True, "boosts": {"i9": 2}}
    status, found = server.ask("/recommend", asked)
    assert status == 200 and found["run_dir"] == str(runs[0])
    answers = [(x["id"], x["by"], x["unknown"]) for x in found["recommendations"]]
    assert answers == [("a", "model", 1), (7, "popularity", 0)]
    assert_same(found["recommendations"], direct, asked)
    asked = {"users": ["u7", "u3", "u7"], "allowed": ["i1", "i2", "i3", 4], "excluded": ["i2"]}
    status, found = server.ask("/recommend", asked)
    assert [x["id"] for x in found["recommendations"]] == ["u7", "u3", "u7"]
    assert_same(found["recommendations"], direct, asked)
    times = [["2020-01-02T00:00:00Z", "2020-01-01"], [1577923200, 1577836800]]
    dated = [{"items": ["i1", "i2"], "times": some} for some in times]
    one, two = server.ask("/recommend", {"histories": dated})[1]["recommendations"]
    assert {**one, "id": 1} == two
    asked = {"items": ["i3", "i1"], "k": 4, "allowed": ["i1", "i2", "i4"], "excluded": ["i4"]}
    status, found = server.ask("/similar", asked)
    assert status == 200 and [x["id"] for x in found["similar"]] == ["i3", "i1"]
    table = direct.similar(**asked)
    assert [name for x in found["similar"] for name in x["items"]] == table["similar"].tolist()
    status, found = server.ask("/health")
    kept = {"status": "ready", "model": "PosSASRec", "run_dir": str(runs[0]), "items": 40}
    assert status == 200 and kept.items() <= found.items() and found["trained"] <= found["loaded"]


@pytest.mark.parametrize(
    ("status", "field", "path", "body"),
    [
        (404, "GET /recommend/", "/recommend/", None),
        (400, "Invalid JSON", "/recommend", b'{"histories": ' + b"[" * 9999),
        (422, "the body: unknown key 'becase' (did you mean bec", "/recommend", {"becase": 2}),
        (422, "k: ", "/recommend", {"users": ["u1"], "k": 0}),
        (422, "k: at most", "/recommend", {"users": ["u1"], "k": 1001}),
        (422, "users: ", "/recommend", {"users": ["no one"]}),
        (422, "histories[0].items[1]: ", "/recommend", {"histories": [["i1", None]]}),
        (422, "boosts: ", "/recommend", {"users": ["u1"], "boosts": {"i1": float("inf")}}),
        (422, "allowed: ", "/similar", {"items": ["i1"], "allowed": ["i999"]}),
        (413, "histories: ", "/recommend", {"histories": [[]] * 257}),
        (413, "the body is longer", "/similar", b" " * 2**22),
        (422, "the model is not reloaded", "/reload", {"run_dir": "/nowhere"}),
        (422, "the model is not reloaded", "/reload", {"run_dir": "a\0b"}),
    ],
)
def test_wrong_requests_are_refused(
    server: Server, status: int, field: str, path: str, body: Any
) -> None:
    found, output = server.ask(path, body)
    assert found == status and list(output) == ["error"], output
    assert output["error"].startswith(field) and len(output["error"]) < 1000


def test_headers(server: Server) -> None:
    for kind, wanted in ((None, 415), ("Application/JSON; charset=utf-8", 200)):
        headers = {} if kind is None else {"Content-Type": kind}
        assert server.ask("/recommend", {"users": ["u1"]}, headers=headers)[0] == wanted
    for name in ("X-Forwarded-For", "Origin"):  # a proxy's, a browser's: not from this machine
        status, output = server.ask("/reload", {}, headers={**JSON, name: "127.0.0.1"})
        assert status == 403 and "--allow_reload" in output["error"]


@pytest.mark.parametrize(
    ("host", "wanted"),
    [("127.0.0.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("::ffff:10.0.0.1", False)],
)
def test_which_addresses_are_of_this_machine(host: str, wanted: bool) -> None:
    """A socket of IPv6 has addresses of IPv4 in its own form."""
    from recbole_pos.serve.http import _is_local

    assert _is_local(Request({"type": "http", "headers": [], "client": (host, 1)})) is wanted


def test_two_models_share_the_ids(
    runs: list[Path], direct: Recommender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name, or by the hash of the id: the same model at all times; metrics by name."""
    monkeypatch.setenv("RECBOLE_POS_SHARES", "A=0.7 B=0.3")
    models = {"A": direct, "B": Recommender.load(runs[1])}
    with serving(f"A={runs[0]}", f"B={runs[1]}") as server:
        histories = [{"id": f"u{n}", "items": ["i1", "i2"]} for n in range(200)]
        status, found = server.ask("/recommend", {"histories": [*histories, ["i3"]], "k": 3})
        *answers, last = found["recommendations"]
        assert status == 200 and found["models"] == {"A": str(runs[0]), "B": str(runs[1])}
        assert [x["id"] for x in answers] == [history["id"] for history in histories]
        assert (last["id"], last["model"]) == (200, "A")  # it has no id
        assert 30 < sum(one["model"] == "B" for one in answers) < 90
        for n in range(20):
            name, asked = answers[n]["model"], {"histories": [histories[n]], "k": 3}
            assert_same([answers[n]], models[name], asked)
            assert server.ask("/recommend", asked)[1]["recommendations"][0]["model"] == name
        wrong = {**histories[66], "times": [1]}  # its number in the request, not in the share
        status, found = server.ask("/recommend", {"histories": [*histories[:66], wrong]})
        assert status == 422 and "histories[66].times" in found["error"]
        status, found = server.ask("/recommend", {"histories": histories[:129] * 2})
        assert status == 413 and "histories: " in found["error"]  # 257 at most, of all shares
        asked = {"users": ["u7", "u3", "u7"]}
        found = server.ask("/recommend", asked)[1]["recommendations"]
        assert [one["id"] for one in found] == asked["users"]
        found = server.ask("/recommend", {**asked, "model": "B"})[1]["recommendations"]
        assert {one["model"] for one in found} == {"B"}
        assert_same(found, models["B"], asked)
        for path, body in (
            ("/recommend", {"users": ["u1"], "model": "C"}),
            ("/reload", {"run_dir": str(runs[2])}),
        ):
            status, found = server.ask(path, body)
            assert status == 422 and found["error"].startswith("model: "), found
        status, found = server.ask("/recommend", {"k": 2})
        assert status == 422 and "histories or users" in found["error"]
        nobody: dict[str, Any] = {"histories": []}
        assert server.ask("/recommend", nobody)[1]["recommendations"] == []
        for body in ({"users": []}, {**nobody, "k": 0}, {**nobody, "because": 1000}):
            assert server.ask("/recommend", body)[0] == 422, body
        status, found = server.ask("/reload", {"run_dir": str(runs[2]), "model": "B"})
        assert status == 200 and found["models"]["B"]["model"] == "TORoPE"
        metrics = server.ask("/metrics")[1]
        assert 'recbole_pos_scoring_seconds_count{model="B"}' in metrics
        assert 'recbole_pos_reloads_total{model="B",outcome="done"} 1.0' in metrics
        assert server.ask("/similar", {"items": ["i3"], "model": "A"})[0] == 200


def test_reloads_lose_no_request(server: Server, runs: list[Path]) -> None:
    """Four clients ask without a pause; each answer is whole, and of the model that it names."""
    models = {str(run): Recommender.load(run) for run in runs}
    history = {"id": "a", "items": ["i1", "i5", "i9"], "times": [1.5e9, 1.5e9 + 60, 1.5e9 + 99]}
    asked = {"histories": [history], "k": 6}
    over, answers = threading.Event(), []

    def ask_on() -> None:
        connection = server.client()
        while not over.is_set():
            try:
                answers.append(server.ask("/recommend", asked, client=connection))
            except Exception as error:
                answers.append((0, error))

    clients = [threading.Thread(target=ask_on) for _ in range(4)]
    for one in clients:
        one.start()
    try:
        for run in (runs[1], runs[2], runs[0]):
            status, found = server.ask("/reload", {"run_dir": str(run)})
            assert status == 200 and found["run_dir"] == str(run)
        status, output = server.ask("/reload", {"run_dir": str(runs[0].parent)})
        assert status == 422 and "is not reloaded and stays as it was" in output["error"]
        os.kill(server.process.pid, signal.SIGHUP)
        done = 'recbole_pos_reloads_total{model="default",outcome="done"} 4.0'
        wait(lambda: done in server.ask("/metrics")[1])
    finally:
        over.set()
        for one in clients:
            one.join()
    assert {status for status, _ in answers} == {200}, [x for x in answers if x[0] != 200][:3]
    by_run = {(f["run_dir"], json.dumps(f["recommendations"])) for _, f in answers}
    assert {run for run, _ in by_run} == set(models)
    assert len(by_run) == len(models)  # one answer a model, always the same
    for run, found in by_run:
        assert_same(json.loads(found), models[run], asked)
    metrics = server.ask("/metrics")[1]
    assert 'recbole_pos_requests_total{path="/recommend",status="200"}' in metrics
    assert "recbole_pos_histories_total" in metrics and "request_seconds_bucket" in metrics


def test_a_signal_while_it_starts_ends_it_with_0() -> None:
    def start() -> int:
        load = builtins.__import__

        def load_or_end(name: str, *given: Any, **more: Any) -> Any:
            if name == "recbole_pos.serve.http":
                os.kill(os.getpid(), signal.SIGTERM)
            return load(name, *given, **more)

        builtins.__import__ = load_or_end
        return main(["serve", "no run folder", "--port=0"])

    done = fork(start)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_service_is_unavailable_while_it_loads_or_is_full(runs: list[Path]) -> None:
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
    with holder._loading, pytest.raises(Refusal, match="^a model is being loaded already"):
        service.reload_model("one")
    assert 'outcome="failed"} 0.0' in asyncio.run(service.measured()).body.decode()
    with pytest.raises(UsageError):
        holder.load("nowhere")
    assert holder.run_dir == str(runs[0])


def test_what_cannot_be_served(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(["serve", runs[0], f"--port={port}"], f"127.0.0.1, port {port}")
    refused(["serve", tmp_path], "run folder")
    refused(["serve", runs[0], "--threads=0"], "--threads")
    (tmp_path / "config.yaml").write_bytes((runs[0] / "config.yaml").read_bytes())
    (tmp_path / "checkpoint.pt").write_bytes((runs[0] / "checkpoint.pt").read_bytes()[:1000])
    refused(["serve", tmp_path, "--port=0"])
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "recbole_pos.serve.http", raising=False)
    refused(["serve", os.devnull], "pip install 'recbole-pos[serve]'")


ODD = [None, True, -1, 1.5, 2**70, 10**400, float("nan"), "", "\x00", "é😀", [], {}, [[]], [None]]
ODD += [{"items": 1}, {"items": ["i1"], "times": [float("nan")]}, {"items": ["i1"] * 9999}, [1e99]]
FIELDS = "histories users k exclude_seen allowed excluded boosts at because odd".split()
RAW = [b"", b"[", b"[" * 100_000, b'{"users": ["\xff"]}', b'{"users": ["\\ud800"]}', b"{}", b"NaN"]


def test_nothing_that_is_sent_breaks_it(server: Server, direct: Recommender) -> None:
    """Each field of a request with each odd value, and of a history: an answer or an error."""
    whole = {"items": ["i1", "new"], "times": [0, -1e18], "id": "a", "at": None, "user": {}}
    bodies: list[Any] = [*RAW]
    bodies += [{"histories": [whole], "k": 3, field: odd} for field in FIELDS for odd in ODD]
    bodies += [{"histories": [{**whole, field: odd}]} for field in whole for odd in ODD]
    bodies += [{"users": [odd]} for odd in ODD] + [{"users": ["u1"], "boosts": {"i1": 1e30}}]
    counts, client = dict.fromkeys((200, 400, 413, 422), 0), server.client()
    for body in bodies:
        status, found = server.ask("/recommend", body, client=client)
        counts[status] += 1
        if status == 200:
            assert_same(found["recommendations"], direct, body)
        else:
            assert list(found) == ["error"] and "Traceback" not in found["error"]
    assert min(counts.values()) > 3 or not counts[413]


def test_sigterm_ends_it_when_requests_are_answered(server: Server) -> None:
    body = b'{"users": ["u1"]}'
    head = "POST /recommend HTTP/1.1", "Host: x", "Content-Type: application/json"
    head = "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as under_way:
        under_way.sendall(head + body[:3])
        server.ask("/health")  # by now, it is read
        server.process.terminate()
        server.process.join(0.5)
        assert server.process.is_alive()
        under_way.sendall(body[3:])
        assert under_way.recv(65536).startswith(b"HTTP/1.1 200")
    server.process.join(PATIENCE)
    assert server.process.exitcode == 0
