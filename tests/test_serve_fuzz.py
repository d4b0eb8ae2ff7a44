"""The HTTP service is sent a thousand requests, and things that are no requests."""

from __future__ import annotations

import copy
import json
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server import Server, same, serving, trained

from recbole_pos.serve.recommender import Recommender

CASES = 1_000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("serve") / "run")


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[Server]:
    with serving(run) as one:
        yield one


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


def test_nothing_that_is_sent_breaks_it(server: Server, run: Path, record_property: Any) -> None:
    rng, direct = random.Random(0), Recommender.load(run)
    catalogue, counts = set(direct.items), dict.fromkeys((200, 400, 404, 405, 413, 415, 422), 0)
    client = server.client()
    for case in range(CASES):
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
    assert counts[200] > CASES / 4 and counts[400] and counts[422]
    record_property("fuzz", f"{CASES:,} requests: {counts}")


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


@pytest.mark.parametrize("raw", RAW, ids=range(len(RAW)))
def test_what_is_no_http(server: Server, raw: bytes) -> None:
    """Answered with 4xx, if at all; the next one is answered as ever."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(raw)
        sock.shutdown(socket.SHUT_WR)
        said = b""
        try:
            while part := sock.recv(65536):
                said += part
        except ConnectionResetError:
            pass
    assert not said or said.startswith(b"HTTP/1.1 4"), said
    assert b"Traceback" not in said and server.ask("GET", "/health")[0] == 200
