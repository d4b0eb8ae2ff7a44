"""Models and schemes that installed packages bring (entry points), and tables of names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from own_models import GRU, MODULE, call, options
from torch import nn

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.model.models import ADDED, name_of
from recbole_pos.position.schemes import SCHEMES, scheme_names
from recbole_pos.tables import Table


@pytest.fixture
def package(tmp_path: Path, monkeypatch) -> Path:
    """A package of others, as installed: a model, and a module and a function that register."""
    folder = tmp_path / "site"
    (folder / "my_package").mkdir(parents=True)
    (folder / "my_package" / "__init__.py").write_text(
        "def register():\n    import recbole_pos\n    from my_package import parts\n"
        "    recbole_pos.register_scheme('later', parts.Recency, {'recency_slope': 2.0})\n"
    )
    scheme = 'recbole_pos.register_scheme("recency", Recency, {"recency_slope": 1.0})\n'
    (folder / "my_package" / "parts.py").write_text(MODULE + scheme)
    dist = folder / "my_package-1.0.dist-info"
    dist.mkdir()
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (dist / "entry_points.txt").write_text(
        "[recbole_pos.models]\nMarkov = my_package.parts:Markov\nBroken = my_package.none:A\n"
        "Absent = my_package.parts\n"
        "[recbole_pos.schemes]\nrecency = my_package.parts\nlater = my_package:register\n"
    )
    monkeypatch.syspath_prepend(folder)
    for table in (ADDED, SCHEMES):
        table.__dict__.pop("_points", None)
    yield folder
    monkeypatch.undo()
    for table in (ADDED, SCHEMES):
        table.__dict__.pop("_points", None)


def test_a_package_brings_them(package: Path, tiny: Path) -> None:
    assert {"Markov", "Broken"} <= set(ADDED) and {"recency", "later"} <= set(SCHEMES)
    assert "my_package" not in sys.modules  # names need no import
    assert scheme_names(["recency", "rope"]) and "my_package" not in sys.modules
    config = PosConfig("Markov", "tiny", None, options(tiny))
    assert config["state_size"] == 8 and "plugins" not in config.plain
    given = options(tiny, position=["recency", "later"])
    config = PosConfig("PosSASRec", "tiny", None, given)
    assert config["recency_slope"] == 2.0 and "plugins" not in config.plain
    assert SCHEMES.source("recency") == ADDED.source("Markov") == "my-package"
    from my_package.parts import Markov

    assert name_of(Markov) == "Markov"
    recbole_pos.register_model(Markov)  # by hand too


def test_a_broken_package_stands_in_nobodys_way(package: Path, tiny: Path) -> None:
    with pytest.raises(UsageError, match="'Broken' of the package my-package, my_package.none:A: "
                       "cannot be imported: ModuleNotFoundError"):  # fmt: skip
        PosConfig("Broken", "tiny", None, options(tiny))
    with pytest.raises(UsageError, match="'Absent' .* registers no model of this name"):
        PosConfig("Absent", "tiny", None, options(tiny))
    assert PosConfig("FPARec", "tiny", None, options(tiny))["model"] == "FPARec"
    assert "is no recommender" in _message(lambda: recbole_pos.register_model(nn.Linear))


def test_a_name_given_twice_says_by_whom(package: Path, tiny: Path) -> None:
    entries = package / "my_package-1.0.dist-info" / "entry_points.txt"
    entries.write_text("[recbole_pos.models]\nMarkov = my_package.parts:Markov\n"
                       "FPARec = my_package.parts:TinyGRU\n"
                       "[recbole_pos.schemes]\nrope = my_package.parts\n")  # fmt: skip
    second = package / "your_package-1.0.dist-info"
    second.mkdir()
    (second / "METADATA").write_text("Metadata-Version: 2.1\nName: your-package\nVersion: 1.0\n")
    (second / "entry_points.txt").write_text("[recbole_pos.models]\nMarkov = your_package:Markov\n")
    for table in (ADDED, SCHEMES):
        table.__dict__.pop("_points", None)
    for model, wanted in (
        ("Markov", r"my-package \(my_package.parts:Markov\) and by your-package"),
        ("FPARec", r"recbole-pos and by my-package \(my_package.parts:TinyGRU\)"),
    ):
        with pytest.raises(UsageError, match=f"{model!r} is given more than once: by {wanted}"):
            PosConfig(model, "tiny", None, options(tiny))
    with pytest.raises(UsageError, match="'rope' is given more than once: by recbole-pos and"):
        PosConfig("PosSASRec", "tiny", None, options(tiny, position=["rope"]))
    assert PosConfig("PARec", "tiny", None, options(tiny))["model"] == "PARec"


def test_someone_elses_name_cannot_be_registered(package: Path, mine) -> None:
    with pytest.raises(UsageError, match="taken by the package my-package"):
        recbole_pos.register_model(mine.Markov)


def test_they_are_listed_with_where_they_are_from(package: Path, mine, capsys, monkeypatch) -> None:
    """Those that cannot be had as well, with the reason."""
    monkeypatch.setenv("COLUMNS", "200")
    recbole_pos.register_model(mine.TinyGRU, defaults=GRU)
    assert main(["models"]) == 0 and main(["schemes"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for wanted in (
        "Markov │ my-package │ The last item alone, in RecBole's form.",
        "TinyGRU │ __main__ │ A GRU over the history.",
        "Broken │ my-package │ model 'Broken' of the package my-package",
        "recency │ logits │ order │ 2 │ recency_slope │ Logits fall with distance.",
    ):
        assert any(wanted in line for line in lines), wanted


def _message(action) -> str:
    with pytest.raises(UsageError) as caught:
        action()
    return str(caught.value)


def test_tables_are_read_without_torch() -> None:
    """Names, entry points included, cost no import of what they stand for."""
    code = (
        "import sys\n"
        "from recbole_pos.model.models import OURS, runnable\n"
        "from recbole_pos.position.schemes import SCHEMES, scheme_names\n"
        "assert 'FPARec' in OURS and 'SASRec' in runnable() and scheme_names(['rope'])\n"
        "assert len(list(OURS)) > 10 and 'Nobody' not in OURS\n"
        "heavy = {'torch', 'recbole', 'ray', 'matplotlib', 'cloudpickle'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    call(Path.cwd(), "-c", code)


def test_a_table_of_nothing_but_its_own() -> None:
    table = Table("thing", {"a": "collections:OrderedDict"}, folder="model")
    assert list(table) == ["a"] and "b" not in table and len(table) == 1
    with pytest.raises(KeyError):
        table["b"]
    assert table.name_of(table["a"]) == "a" and table.source("a") == "recbole-pos"
