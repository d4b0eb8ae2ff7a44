"""The HTTP service: a server process, asked over real connections."""

import http.client
import json
import math
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE

from recbole_pos.cli.main import main
from recbole_pos.serve.recommender import Recommender

JSON = {"Content-Type": "application/json"}


Ask = Callable[..., tuple[int, Any]]  # of a path and a body: status and content


@pytest.fixture(scope="module")
def ask(run_dir: Path) -> Iterator[Ask]:
    """A server that is forked from this process, and ended with SIGTERM, which must go well."""
    reader, writer = os.pipe()

    def child() -> None:
        for output in (1, 2):
            os.dup2(writer, output)
        sys.stdout, sys.stderr = (open(output, "w", closefd=False) for output in (1, 2))
        code = main(["serve", "--port=0", str(run_dir)])
        sys.stdout.flush()
        os._exit(code)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    os.close(writer)

    def send(path: str, body: Any = None) -> tuple[int, Any]:
        """POST, or GET without a body; bytes go as they are."""
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        client.request("GET" if body is None else "POST", path, body, JSON)
        answer = client.getresponse()
        content = answer.read().decode()
        is_json = answer.headers.get_content_type() == "application/json"
        return answer.status, json.loads(content) if is_json else content

    with open(reader) as printed:
        try:
            matches = (re.search(r"http://127.0.0.1:(\d+)", line) for line in printed)
            port = int(next(match[1] for match in matches if match))
            yield send
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
def run_dir(trained: Callable[..., Path]) -> Path:
    return trained("PosSASRec")


@pytest.fixture(scope="module")
def direct(run_dir: Path) -> Recommender:
    return Recommender.load(run_dir)


def test_answers_are_those_of_the_library(ask: Ask, direct: Recommender) -> None:
    allowed = ["i4", "i9", "i5", "new"]
    one = {"id": "a", "items": ["i1", "i2", "new"], "allowed": allowed}
    none = {"id": 7, "items": [], "excluded": ["i9"]}
    asked = {"histories": [one, none], "k": 5, "exclude_seen": True, "boosts": {"i9": 2}}
    status, found = ask("/recommend", asked)
    assert status == 200
    answers = [(x["id"], x["by"], x["unknown"]) for x in found["recommendations"]]
    assert answers == [("a", "model", 1), (7, "popularity", 0)]
    assert set(found["recommendations"][0]["items"]) == {"i4", "i9", "i5"}
    assert_same(found["recommendations"], direct, asked)
    asked = {"users": ["u7", "u3", "u7"], "allowed": ["i1", "i2", "i3", 4], "excluded": ["i2"]}
    status, found = ask("/recommend", asked)
    assert [x["id"] for x in found["recommendations"]] == ["u7", "u3", "u7"]
    assert_same(found["recommendations"], direct, asked)
    asked = {"items": ["i3", "i1"], "k": 4, "allowed": ["i1", "i2", "i4"], "excluded": ["i4"]}
    status, found = ask("/similar", asked)
    assert status == 200 and [x["id"] for x in found["similar"]] == ["i3", "i1"]
    table = direct.similar(**asked)
    assert [name for x in found["similar"] for name in x["items"]] == table["similar"].tolist()


def test_what_it_says_of_itself(ask: Ask, run_dir: Path) -> None:
    status, found = ask("/health")
    facts = {"status": "ready", "model": "PosSASRec", "run_dir": str(run_dir), "items": 40}
    assert status == 200 and facts.items() <= found.items()
    assert 'recbole_pos_seconds_count{answer="recommend"}' in ask("/metrics")[1]


@pytest.mark.parametrize(
    ("status", "named", "path", "body"),
    [
        (404, "Not Found", "/recommendations", None),
        (422, "JSON decode error", "/recommend", b'{"histories": '),
        (422, "becase", "/recommend", {"becase": 2}),
        (422, "give histories or users, one of the two", "/recommend", {}),
        (422, "no one", "/recommend", {"users": ["u1", "no one"]}),
        (422, "a finite number", "/recommend", {"histories": [{"items": [], "at": math.nan}]}),
        (422, "item 'i999' is not known", "/similar", {"items": ["i999"]}),
    ],
)
def test_wrong_requests(ask: Ask, status: int, named: str, path: str, body: Any) -> None:
    found, output = ask(path, body)
    assert found == status and named in str(output["detail"]), output


def test_nothing_to_serve(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused
) -> None:
    refused(["serve", tmp_path], "run folder")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "recbole_pos.serve.http", raising=False)
    refused(["serve", os.devnull], "pip install 'recbole-pos[serve]'")
