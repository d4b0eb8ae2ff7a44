"""Models and schemes of modules, and of processes that a run or a search starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from own_models import GRU, MODULE, REGISTER, call, options

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config.plugins import allow
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.model.models import ADDED

# --- from a module ---


def test_a_module_of_the_working_directory(here: Path, tiny: Path) -> None:
    """Found where the user names it, recorded once, and its names may stand where names stand."""
    allow(["my_models"])
    (here / "run.yaml").write_text("plugins: [my_models]\nfor:\n  TinyGRU: {gru_width: 4}\n")
    config = PosConfig("TinyGRU", "tiny", ["run.yaml"], options(tiny))
    assert config["gru_width"] == 4 and config.plain["plugins"] == ["my_models"]


def test_a_class_of_a_module_is_recorded_and_one_nobody_registered_is_found(
    here: Path, tiny: Path
) -> None:
    (here / "my_models.py").write_text(MODULE)  # registers nothing
    sys.path.insert(0, str(here))
    import my_models

    assert PosConfig(my_models.Markov, "tiny", None, options(tiny)).plain["plugins"] == [
        "my_models"
    ]
    ADDED._added.clear()
    given = options(tiny, plugins=["my_models"])
    assert PosConfig("Markov", "tiny", None, given).model_class is my_models.Markov
    # with defaults that only this process knows, its import would not be enough
    recbole_pos.register_model(my_models.TinyGRU, defaults=GRU)
    assert "plugins" not in PosConfig("TinyGRU", "tiny", None, options(tiny)).plain


def test_schemes_are_recorded_only_where_they_are_used(here: Path, tiny: Path) -> None:
    allow(["my_models"])
    PosConfig("TinyGRU", "tiny", None, options(tiny, plugins=["my_models"]))
    for position, wanted in (["recency"], ["my_models"]), (["rope"], None):
        plain = PosConfig("PosSASRec", "tiny", None, options(tiny, position=position)).plain
        assert plain.get("plugins") == wanted


@pytest.mark.parametrize(
    ("text", "plugins", "wanted"),
    [
        ("", ["no_models"], "there is no module 'no_models', neither installed nor in"),
        ("import no_such_thing", ["my_models"], "my_models cannot be imported: ModuleNotFound"),
        ("1 / 0", ["my_models"], "my_models cannot be imported: ZeroDivisionError"),
        ("", ["my_models.py"], "no module 'my_models.py'|as `import` names them"),
        ("", [3], "expected modules such as"),
        ("", ["./my_models"], "expected modules such as"),
    ],
)
def test_wrong_plugins(here: Path, tiny: Path, text: str, plugins: list, wanted: str) -> None:
    (here / "my_models.py").write_text(text)
    allow(plugins)
    with pytest.raises(UsageError, match=f"configuration: plugins: .*({wanted})"):
        PosConfig("FPARec", "tiny", None, options(tiny, plugins=plugins))
    assert str(here) not in sys.path or text


def test_a_run_of_a_module_in_fresh_processes(here: Path, tiny: Path) -> None:
    """Trained by the command; asked for recommendations, resumed and loaded by others."""
    given = [f"--{key}={value}" for key, value in options(tiny, hidden_size=8).items()]
    call(here, "-m", "recbole_pos.cli.main", "run", "-m", "TinyGRU", "-d", "tiny",
         "--plugins=[my_models]", *given, "--run_dir=out", "--quiet")  # fmt: skip
    assert yaml.safe_load((here / "out" / "config.yaml").read_text())["plugins"] == ["my_models"]
    main = "import sys\nfrom recbole_pos.cli.main import main\n"
    recommend = "assert main(['recommend', 'out', '-k', '2', '--users', 'u9', *named]) == 0\n"
    resume = "assert main(['run', '--resume', 'out', '--epochs=2', '--quiet', *named]) == 0\n"
    look = "assert main(['plot', 'out', *named]) == 0\n"
    named = "sys.path.remove('')\nnamed = ['--plugins', 'my_models']\n"  # as if installed
    for command in (recommend, resume, look):
        call(here, "-c", main + named + command)
    assert (here / "out" / "recommendations.csv").read_text().count("u9") == 2
    assert len((here / "out" / "metrics.jsonl").read_text().splitlines()) == 2

    (here / "elsewhere").mkdir()
    said = call(
        here / "elsewhere",
        "-c",
        f"{main}main(['recommend', '../out'])\n{MODULE}{REGISTER}"
        "print(type(recbole_pos.load('../out').model))\n",
    )
    assert "plugins: module 'my_models' is not installed" in said and "register" in said
    assert "__main__.TinyGRU" in said


# --- other processes ---


@pytest.mark.long
def test_processes_of_a_script_know_its_classes(tiny: Path, tmp_path: Path) -> None:
    """--nproc starts processes; the classes are those of a script's ``main`` alone."""
    body = (MODULE + REGISTER + f"""
given = {options(tiny, hidden_size=8)!r}
recbole_pos.run(TinyGRU, "tiny", None, given, run_dir="gru", nproc=2, verbose=False)
""").strip()  # fmt: skip
    indented = "\n".join(f"    {line}" if line else "" for line in body.splitlines())
    (tmp_path / "script.py").write_text(f'if __name__ == "__main__":\n{indented}\n')
    call(tmp_path, "script.py")
    assert (tmp_path / "gru" / "result.json").is_file()


def test_what_cannot_be_sent_is_named(tiny: Path, mine) -> None:
    import threading

    mine.TinyGRU.lock = threading.Lock()
    recbole_pos.register_model(mine.TinyGRU, defaults=GRU)
    with pytest.raises(UsageError, match="TinyGRU.* cannot be sent to other processes"):
        recbole_pos.run("TinyGRU", "tiny", None, options(tiny), verbose=False, nproc=2)


def test_trials_of_a_search_know_classes_of_this_process(tiny: Path, mine, tmp_path: Path) -> None:
    recbole_pos.register_model(mine.TinyGRU, defaults=GRU)
    (tmp_path / "space.yaml").write_text("gru_width: {choice: [1, 2]}\n")
    found = recbole_pos.search(
        mine.TinyGRU, "tiny", tmp_path / "space.yaml", None, options(tiny, hidden_size=8),
        searcher="grid", max_concurrent=1, run_dir=tmp_path / "out", verbose=False,
    )  # fmt: skip
    assert [trial.state for trial in found.trials] == ["finished"] * 2
    assert recbole_pos.load(tmp_path / "out" / "best").model.gru.num_layers == 1


def test_lists_have_those_of_a_module(here: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["models", "--plugins=[my_models]"]) == 0
    assert main(["schemes", "--plugins", "my_models"]) == 0
    printed = capsys.readouterr().out
    assert "TinyGRU" in printed and "recency_slope" in printed
    assert main(["models", "--plugins=no_models"]) == 2
    assert "there is no module 'no_models'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("run -m TinyGRU -d tiny --plugin=[my_models]", "unknown key 'plugin' (did you mean plu"),
        ("run -m TinyGRU --plugin=[my_models] --help", "unknown key 'plugin' (did you mean plu"),
        ("tune -m PosSASRec -d tiny --position=[recency] --pluginss my_models", "'pluginss' (did"),
        ("run -m TinyGRU -d tiny", "unknown model 'TinyGRU'"),
        ("models --plugin my_models", "found --plugin my_models (did you mean --plugins?)"),
        ("schemes my_models", "found my_models\n"),
    ],
)
def test_an_option_that_is_nearly_plugins(here: Path, capsys, command: str, wanted: str) -> None:
    assert main(command.split()) == 2
    assert wanted in capsys.readouterr().err


def test_options_of_one_in_a_module_are_listed(here: Path, capsys) -> None:
    assert main(["run", "-m", "TinyGRU", "--plugins=[my_models]", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "gru_width" in printed and "Standard deviation of" in printed
