"""The command line as a person meets it: exit codes, one readable message, no traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

import recbole_pos
from recbole_pos.cli.commands import make_parser
from recbole_pos.cli.main import main
from recbole_pos.cli.parser import parse_overrides, split_options
from recbole_pos.errors import UsageError
from recbole_pos.yaml_files import read_yaml

SCRIPT = Path(__file__).parent.parent / "run_recbole_pos.py"
ML = ["-m", "FPARec", "-d", "ml-100k"]
POS = ["-m", "PosSASRec", "-d", "ml-100k"]


def test_run_writes_a_result_and_prints_a_table(
    tiny: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    """Later files win over earlier ones, options over files; a value may follow a space."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("epochs: 3\nhidden_size: 16\ninner_size: 16\n")
    (tmp_path / "b.yaml").write_text("epochs: 1\n")
    line = f"-m FPARec -d tiny --data_path {tiny} --config_files a.yaml b.yaml --topk [1,10]"
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
        ([*ML, "--learing_rate=0.1"], "learning_rate"),
        (["-m", "FPARec", "-d", "nowhere"], "'nowhere'"),
        (["-d", "ml-100k"], "(-m)"),
        (["-m", "FPARec"], "(-d)"),
        ([*ML, "--TIME_FIELD=when"], "TIME_FIELD"),
        ([*ML, "--ITEM_ID_FIELD=rating"], "float"),
        ([*ML, "--epochs=1", "--epochs=2"], "--epochs"),
        ([*ML, "--epochs"], "--epochs"),
        ([*ML, "--config_files", "no.yaml"], "no.yaml"),
        ([*ML, "--log_wandb=True"], "log_wandb"),
        (["--resume", "nowhere"], "nowhere"),
        ([*POS, "--position=[parec, fparec]"], "replaces attention"),
        ([*POS, "--position=[nope, rope]"], "nope stands alone"),
        ([*POS, "--position=[[rope]]"], "['rope']"),
        (["-m", "KernelAttention", "-d", "ml-100k", "--kernel_band=51"], "kernel_band"),
        ([*ML, "--eval_args={split: {RS: [8, 1, .inf]}}"], "finite"),
    ],
    ids=lambda x: " ".join(x[2:]) if isinstance(x, list) else "",
)
def test_wrong_input_is_one_message_and_exit_code_2(
    tmp_path: Path, monkeypatch, capsys, arguments: list[str], named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)  # no wandb
    assert main(["run", *arguments]) == 2
    error = capsys.readouterr().err
    assert named in error and error.startswith("error: ") and "Traceback" not in error
    assert not list(tmp_path.iterdir())  # nothing half-made is left behind


def every_parser(command: str = "", parser: Any = None) -> Iterator[tuple[str, Any]]:
    """Each command line that only lacks its arguments, and its parser."""
    parser = parser or make_parser()[0]
    below = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
    if not below:
        yield command, parser
    for name, one in (item for choices in below for item in choices.items()):
        yield from every_parser(f"{command} {name}".strip(), one)


def test_what_argparse_refuses_is_one_line_too(capsys) -> None:
    """The option, what is wrong, and where to read more; exit code 2, no usage text."""
    lines = {"": "COMMAND", "runn": "did you mean run", "inspect": "WHAT", "run x": "found x"}
    lines |= {"run --quiet --json": "--quiet", "recommend x --users a --histories b": "--users"}
    for command, parser in every_parser():
        for action in parser._actions:
            name = (action.option_strings or [""])[-1]
            if name and action.nargs != 0:
                lines |= {f"{command} {name}": name, f"{command} {name}=--": name}
                if action.type is not None and action.type is not str:
                    lines[f"{command} {name}=nan"] = "found 'nan', expected a"
            elif name == "--debug":
                lines[f"{command} --debug=3"] = name
    assert len(lines) > 200
    for line, named in lines.items():
        assert main(line.split()) == 2, line
        error = capsys.readouterr().err
        assert error.startswith("error: ") and named in error and error.count("\n") == 1, error


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(UsageError):
        main(["run", "-m", "x", "-d", "ml-100k", "--debug"])


def test_unexpected_errors_are_one_message_too(monkeypatch, capsys) -> None:
    monkeypatch.setattr("recbole_pos.experiment.run.run", lambda *a, **k: 1 / 0)
    assert main(["run", "-m", "FPARec", "-d", "ml-100k"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_version(capsys) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"recbole-pos {recbole_pos.__version__}\n"


def test_serve_and_recommend_read_the_environment(monkeypatch, capsys) -> None:
    """What the command line has comes first; a value that cannot be names its variable."""
    taken: list[Any] = []
    monkeypatch.setattr("recbole_pos.serve.http.serve", lambda *given: taken.append(given))
    monkeypatch.setattr(
        "recbole_pos.serve.recommend.write_recommendations",
        lambda run_dir, **given: taken.append((run_dir, given)),
    )
    for name, text in {
        "RUN_DIR": "live",
        "PORT": "90",
        "ALLOW_RELOAD": "true",
        "EXCLUDE_SEEN": "0",
        "K": "7",
    }.items():
        monkeypatch.setenv(f"RECBOLE_POS_{name}", text)
    assert main(["serve", "--threads", "3"]) == 0
    folders, settings = taken.pop()
    assert folders == {"default": "live"}
    assert (settings.port, settings.threads, settings.allow_reload) == (90, 3, True)
    assert main(["serve", "A=a", "B=b", "--port", "91"]) == 0
    folders, settings = taken.pop()
    assert folders == {"A": "a", "B": "b"} and settings.port == 91
    assert main(["recommend"]) == 0
    run_dir, given = taken.pop()
    assert (run_dir, given["k"], given["exclude_seen"]) == ("live", 7, False)
    monkeypatch.setenv("RECBOLE_POS_PORT", "http")
    assert main(["serve"]) == 2
    assert "RECBOLE_POS_PORT: found 'http', expected a whole number" in capsys.readouterr().err
    assert main(["models"]) == 0  # others do not read it


def test_overrides_are_yaml() -> None:
    given = parse_overrides(["--a=1e-3", "--b=[x, 2]", "--c=k=v", "--d=", "--e.f=[1]", "--e.g=|"])
    assert given == {"a": 0.001, "b": ["x", 2], "c": "k=v", "d": None, "e": {"f": [1], "g": "|"}}
    for twice in (["--a=1", "--a=2"], ["--a=1", "--a.b=2"], ["--a.b=1", "--a.b=2"]):
        with pytest.raises(UsageError, match="given twice"):
            parse_overrides(twice)


@pytest.mark.slow
def test_the_script_is_the_same_command(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "-m", "x", "-d", "y"]
    done = subprocess.run(command, capture_output=True, cwd=tmp_path, text=True)
    assert done.returncode == 2 and "unknown model 'x'" in done.stderr


@pytest.mark.parametrize(
    ("line", "mine", "options"),
    [
        ("-m FPARec --epochs 2 -d x", "-m FPARec -d x", "--epochs=2"),
        ("--lambda_0 -1.5 --nproc 2", "--nproc 2", "--lambda_0=-1.5"),
        ("--config_files a.yaml b.yaml --seed 3", "--config_files a.yaml b.yaml", "--seed=3"),
        ("--quiet --topk [1,2] --log f", "--quiet --log f", "--topk=[1,2]"),
        ("--tensorboard --epochs=1 -m FPARec", "-m FPARec", "--tensorboard --epochs=1"),
    ],
)
def test_one_syntax_on_a_line(line: str, mine: str, options: str) -> None:
    """A value may stand after = or after a space, as of the command's own options."""
    own = {"m", "d", "nproc", "config_files", "quiet", "log"}
    assert split_options(line.split(), own) == (mine.split(), options.split())


HEAVY = {"torch", "recbole", "ray", "matplotlib", "pandas", "scipy", "numpy"}


@pytest.mark.slow
@pytest.mark.parametrize("line", ["--help", "models", "run -m FPARec --help", "serve --help"])
def test_what_only_tells_imports_nothing_heavy(line: str) -> None:
    """In a process of its own, as a shell starts it: half a second of CPU at most."""
    code = (
        "import sys, time; from recbole_pos.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print('\\n', time.process_time(), *sys.modules, file=sys.stderr)"
    )
    least = 9.0
    for _ in range(5):  # a busy machine makes the same work cost more
        command = [sys.executable, "-c", code, *line.split()]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds, *modules = done.stderr.split()
        assert not HEAVY & set(modules) and len(done.stdout) > 10
        if (least := min(least, float(seconds))) < 0.5:
            break
    assert least < 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "rank", "wanted"),
    [
        ("-m FPARec -d shop --log LOG", "0", "recbole-pos .*: FPARec on shop\n"),
        ("run -m FPARec -d shop --quiet", "0", ""),
        ("run -m FPARec -d shop", "1", ""),  # the second process of torchrun
    ],
)
def test_a_run_says_what_begins_before_torch_is_imported(
    line: str, rank: str, wanted: str, tmp_path: Path
) -> None:
    """What trains is replaced by the question whether anything heavy is there."""
    log = tmp_path / "log"
    code = (
        "import sys, types; late = types.ModuleType('late')\n"
        f"late.run = lambda *a, **k: print(sorted({HEAVY} & set(sys.modules)))\n"
        "sys.modules['recbole_pos.experiment.run'] = late\n"
        "from recbole_pos.cli.main import main; main(sys.argv[1:])"
    )
    environ = {**os.environ, "RANK": rank, "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", code, *line.replace("LOG", str(log)).split()]
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert re.fullmatch(wanted + r"\[\]\n", done.stdout), done
    if "LOG" in line:
        assert re.fullmatch(wanted, log.read_text())


def test_compare_fails_if_a_run_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that a script stops; a report of what there is does not."""
    found = SimpleNamespace(runs=pd.DataFrame({"status": ["done", "failed"]}))
    monkeypatch.setattr("recbole_pos.study.comparing.compare", lambda *_, **__: found)
    words = ["compare", "-m", "Pop", "-d", "ml-100k"]
    assert main(words) == 1 and "1 of 2 runs failed" in capsys.readouterr().err
    assert main([*words, "--report"]) == 0
