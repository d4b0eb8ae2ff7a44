"""The command line as a person meets it: exit codes, one readable message, no traceback."""

import json
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from conftest import run_python

import recbole_pos
from recbole_pos.cli.listing import get_first_paragraph, read_summary
from recbole_pos.cli.main import main
from recbole_pos.config.arguments import split_options
from recbole_pos.layers.hooks import AttentionPosition, InputPosition, replaces_attention
from recbole_pos.position.schemes import SCHEMES
from recbole_pos.yaml_files import read_properties, read_yaml

ML = ["-m", "FPARec", "-d", "ml-100k"]


def test_run_writes_a_result_and_prints_a_table(tiny, tmp_path, monkeypatch, capsys) -> None:
    """Later files win over earlier ones, options over files; a value may follow a space."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("epochs: 3\nhidden_size: 16\ninner_size: 16\n")
    (tmp_path / "b.yaml").write_text("epochs: 1\n")
    line = f"run -m FPARec -d tiny --data_path {tiny} --config_files a.yaml b.yaml --topk [1,10]"
    assert main([*line.split(), "--learning_rate=2e-3", "--show_progress=false"]) == 0
    printed = capsys.readouterr().out
    assert "epoch   0" in printed and "ndcg@10" in printed and "test" in printed
    (folder,) = (tmp_path / "saved" / "tiny" / "FPARec").iterdir()
    result = json.loads((folder / "result.json").read_text())
    assert (result["model"], result["epochs"]) == ("FPARec", 1)
    config = read_yaml(folder / "config.yaml")
    assert (config["learning_rate"], config["topk"]) == (0.002, [1, 10])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["-m", "FPARec", "-d", "nowhere"], "'nowhere'"),
        (["-m", "FPARec"], "(-d)"),
        ([*ML, "--epochs"], "--epochs"),
        ([*ML, "--config_files", "no.yaml"], "no.yaml"),
    ],
    ids=lambda x: " ".join(x[2:]) if isinstance(x, list) else "",
)
def test_wrong_input(tmp_path: Path, monkeypatch, capsys, arguments: list[str], named: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", *arguments]) == 2
    error = capsys.readouterr().err
    assert named in error and error.startswith("error: ") and "Traceback" not in error
    assert not list(tmp_path.iterdir())  # nothing half-made is left behind


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("", "COMMAND"),
        ("runn", "invalid choice: 'runn'"),
        ("recommend x --users a --histories b", "--users"),
        ("run --topk 5 10", "unrecognized arguments: 10"),
        ("export x --to y -k nan", "invalid int value: 'nan'"),
    ],
)
def test_what_argparse_refuses_is_one_line_too(capsys, line: str, named: str) -> None:
    """The option, what is wrong, and where to read more; exit code 2, no usage text."""
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and named in error and error.count("\n") == 1


def test_unexpected_errors_are_one_message_but_for_debug(monkeypatch, capsys) -> None:
    monkeypatch.setattr("recbole_pos.experiment.run.run", lambda *a, **k: 1 / 0)
    assert main(["run", *ML]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):
        main(["run", *ML, "--debug"])


def test_a_value_may_stand_after_a_space() -> None:
    own = {"m", "d", "nproc", "config_files", "quiet", "log"}
    for line, mine, options in (
        ("-m FPARec --epochs 2 -d x", "-m FPARec -d x", "--epochs=2"),
        ("--lambda_0 -1.5 --nproc 2", "--nproc 2", "--lambda_0=-1.5"),
        ("--config_files a.yaml b.yaml --seed 3", "--config_files a.yaml b.yaml", "--seed=3"),
        ("--compile --epochs=1 -m FPARec", "-m FPARec", "--compile --epochs=1"),
    ):
        assert split_options(line.split(), own) == (mine.split(), options.split())


HEAVY = {"torch", "recbole", "ray", "matplotlib", "pandas", "scipy", "numpy"}


@pytest.mark.slow
@pytest.mark.parametrize("line", ["--version", "models", "run -m FPARec --help", "serve --help"])
def test_what_only_tells_imports_nothing_heavy(line: str) -> None:
    """In a process of its own, as a shell starts it: these modules take seconds."""
    code = (
        "import sys; from recbole_pos.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        f"assert not {HEAVY} & set(sys.modules)"
    )
    printed = run_python("-c", code, *line.split())
    assert len(printed) > 1000 or printed == f"recbole-pos {recbole_pos.__version__}\n"


def test_compare_fails_if_a_run_failed(monkeypatch, capsys) -> None:
    """So that a script stops; a report of what there is does not."""
    found = SimpleNamespace(runs=pd.DataFrame({"row": ["A", "B"], "status": ["done", "failed"]}))
    monkeypatch.setattr("recbole_pos.study.comparing.compare", lambda *_, **__: found)
    words = ["compare", "-m", "Pop", "-d", "ml-100k"]
    assert main(words) == 1 and "1 of 2 runs failed" in capsys.readouterr().err
    assert main([*words, "--report"]) == 0


# --- models and schemes ---


@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_known_of_a_scheme_is_true(name: str) -> None:
    """It is written down, so that listing schemes imports none of them."""
    about, scheme = read_properties("position", name).about, SCHEMES[name]
    assert (about["needs"] == "time") == scheme.needs_time
    assert (about["place"] == "input") == issubclass(scheme, InputPosition)
    replaces = issubclass(scheme, AttentionPosition) and replaces_attention(scheme)
    assert (about["place"] == "replaces attention") == replaces
    assert set(SCHEMES.defaults(name)) == set(SCHEMES[name].options)
    assert read_summary(SCHEMES, name) == get_first_paragraph(SCHEMES[name].__doc__)


def test_waiting_threads_sleep_by_default(monkeypatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    code = "import os, recbole_pos; print(os.environ['OMP_WAIT_POLICY'])"
    assert run_python("-c", code) == "PASSIVE\n"
