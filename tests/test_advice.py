"""What a message advises can be done, in the command that gave it; and a message stays short."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shop

import recbole_pos
from recbole_pos.cli.commands import make_parser
from recbole_pos.cli.main import main
from recbole_pos.config.options import OPTIONS
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import prepare
from recbole_pos.values import SECONDS, shown

PACKAGE = Path(recbole_pos.__file__).parent
# The commands whose errors a room raises; of other rooms it may be any.
COMMANDS = {
    "conversion": ["convert"],
    "public": ["data"],
    "study": ["compare", "tune"],
    "tuning": ["tune", "compare"],
    "serve": ["recommend", "serve", "export", "similar"],
    "inspect": ["inspect", "plot"],
}
ELSEWHERE = {"head", "resume", "key"}  # of `ray start`; of another command; any


def flags_of(node: ast.Raise) -> set[str]:
    """Return the options that the text of an error names as on a command line."""
    texts = [str(n.value) for n in ast.walk(node) if isinstance(n, ast.Constant)]
    return {flag for text in texts for flag in re.findall(r"(?<![\w-])--([a-z]\w+)", text)}


def every_parser(parser: Any) -> list[Any]:
    """Return a parser and those of its own commands."""
    below = [a.choices for a in parser._actions if isinstance(getattr(a, "choices", None), dict)]
    return [parser, *(one for found in below for c in found.values() for one in every_parser(c))]


def test_options_that_errors_name_exist() -> None:
    _, commands = make_parser()
    configured = {*OPTIONS, *PosConfig("FPARec", "ml-100k").internal_config_dict}
    known_in: dict[str, set[str]] = {}
    for name, command in commands.items():
        parsers = every_parser(command)
        known_in[name] = set().union(*(one.options for one in parsers)) | ELSEWHERE
        if any(one.get_default("configured") for one in parsers):
            known_in[name] |= configured
    for file in sorted(PACKAGE.rglob("*.py")):
        room = file.relative_to(PACKAGE).parts[0]
        known = set().union(*(known_in[name] for name in COMMANDS.get(room, commands)))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise):
                assert flags_of(node) <= known, f"{file}, line {node.lineno}"


def test_vectors_are_refused_and_their_numbers_are_not(tmp_path: Path) -> None:
    """Also of items, whose vector FDSA and GRU4RecF would read the mean of only."""
    tables = shop.tables(users=30)
    made = np.random.default_rng(0).normal(size=(len(tables["item"]), 2)).round(3)
    for column in range(2):
        tables["item"][f"v{column}:float"] = made[:, column]
    tables["item"]["vector:float_seq"] = [" ".join(map(str, row)) for row in made]
    given = {"data_path": str(shop.write(tmp_path, tables)), "topk": [3], "valid_metric": "NDCG@3"}
    given["load_col"] = {**shop.LOAD, "item": ["item_id", "vector", "v0", "v1"]}
    for numerical in ([], ["vector"]):
        more = {"selected_features": ["vector"], "numerical_features": numerical}
        with pytest.raises(UsageError, match="(selected|numerical)_features: .*'vector'"):
            prepare(PosConfig("GRU4RecF", "shop", None, {**given, **more}))
    more = {key: ["v0", "v1"] for key in ("selected_features", "numerical_features")}
    prepare(PosConfig("GRU4RecF", "shop", None, {**given, **more}))


def test_times_are_read_in_every_unit(tmp_path: Path) -> None:
    """The same data in another unit train to the same loss, up to rounding."""
    losses = []
    for name in ("seconds", "microseconds", "days"):
        tables = shop.tables(users=20)
        tables["inter"]["timestamp:float"] /= SECONDS[name]
        data = shop.write(tmp_path / name, tables)
        given = {"data_path": str(data), "timestamp_unit": name, "epochs": 1, "topk": [3]}
        given |= {"valid_metric": "NDCG@3", "time_unit": "seconds", "time_min_period": 1e5}
        given |= {"time_max_period": 1e9, "seed": 1}
        made = prepare(PosConfig("TORoPE", "shop", None, given))
        made.trainer.fit(made.loaders["train"], saved=False, verbose=False)
        losses.append(made.trainer.progress.history[0]["loss"])
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-5)


@pytest.mark.parametrize(
    ("option", "table", "model", "given"),
    [
        ("relations", "item", "AttrFormer", {"relations": ["brand"]}),
        ("relations", "user", "AttrFormer", {"relations": ["age"]}),
        ("relations", "inter", "AttrFormer", {"relations": ["channel"]}),
        ("brand", "item", "PosSASRec", {"position": ["difsr"], "difsr_fields": ["brand"]}),
        ("selected_features", "item", "SASRecF", {"selected_features": ["tags"]}),
        (
            "selected_features",
            "item",
            "FDSA",
            {"selected_features": ["price"], "numerical_features": ["price"]},
        ),
    ],
    ids=str,
)
def test_a_field_without_a_value_is_refused(
    option: str, table: str, model: str, given: dict[str, Any], tmp_path: Path
) -> None:
    tables = shop.tables()
    for column in tables[table].columns[1 if table != "inter" else 3 :]:
        tables[table][column] = ""
    data = shop.write(tmp_path, tables)
    options = {"data_path": str(data), "load_col": shop.LOAD, "topk": [3]}
    options |= {"valid_metric": "NDCG@3", "filter_inter_by_user_or_item": False, **given}
    with pytest.raises(UsageError) as refused:
        prepare(PosConfig(model, "shop", None, options))
    assert option in str(refused.value) and f"shop.{table}" in str(refused.value)


BROKEN = """
import recbole_pos
from recbole_pos.position.schemes import SCHEMES


class Broken(recbole_pos.PosRecommender):
    def __init__(self, config, dataset):
        super().__init__(config, dataset)
        if {at_once}:
            {line}

    def encode(self, items, ctx):
        {line}
"""
LINES = {KeyError: "{}['brand']", AttributeError: "None.weight", AssertionError: "assert 1 == 2"}


@pytest.mark.parametrize(
    ("kind", "at_once"), [(KeyError, True), (AttributeError, False), (AssertionError, False)]
)
def test_what_a_custom_model_raises_is_shown_as_it_is(
    kind: type[Exception],
    at_once: bool,
    here: Path,
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = BROKEN.replace("{line}", LINES[kind]).replace("{at_once}", str(at_once))
    module = f"broken_{kind.__name__}_{at_once}"
    (here / f"{module}.py").write_text(text + "\n\nrecbole_pos.register_model(Broken)\n")
    monkeypatch.syspath_prepend(here)
    given = {"data_path": str(tiny), "plugins": [module], "epochs": 1}
    with pytest.raises(kind):
        recbole_pos.run("Broken", "tiny", None, given, verbose=False)
    words = [f"--data_path={tiny}", f"--plugins={module}", "--epochs=1"]
    assert main(["run", "-m", "Broken", "-d", "tiny", *words]) == 1
    error = capsys.readouterr().err
    assert f"{module}.py" in error and kind.__name__ in error and LINES[kind] in error


def test_values_in_messages_are_short() -> None:
    """However they are made: long, wide, deep, of parts that stand in each other, or numpy's."""
    shared: Any = ["x" * 50]
    for _ in range(60):
        shared = [shared] * 9
    deep: Any = 1
    for _ in range(900):
        deep = {"a": deep}
    huge = [
        shared,
        deep,
        "y" * 10**6,
        list(range(10**6)),
        {str(n): n for n in range(10**5)},
        10**9999,
    ]
    assert all(len(shown(value)) <= 250 for value in huge)
    found = [shown(value) for value in (np.str_("a"), [np.str_("a")], {"b": np.float64(1.5)})]
    assert found == ["'a'", "['a']", "{'b': 1.5}"]
    assert [shown(value) for value in ([1, "a"], (1,), {}, None)] == [
        "[1, 'a']",
        "(1,)",
        "{}",
        "None",
    ]


def test_names_of_fields_are_shown_plainly(tiny: Path) -> None:
    given = {"data_path": str(tiny), "alias_of_item_id": ["nope"], "plugins": None}

    class Reads(recbole_pos.PosRecommender):
        def encode(self, items: Any, ctx: Any) -> Any: ...

    with pytest.raises(UsageError) as refused:
        prepare(PosConfig(Reads, "tiny", None, given))
    assert "alias_of_item_id" in str(refused.value) and "np.str_" not in str(refused.value)
    given = {"data_path": str(tiny), "unused_col": {"inter": ["timestamp"]}}
    with pytest.raises(UsageError, match="unused_col.*'timestamp'"):
        prepare(PosConfig("FPARec", "tiny", None, given))
