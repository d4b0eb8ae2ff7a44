"""The command line as a person meets it: exit codes, one readable message, no traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import recbole_pos
from recbole_pos.cli.arguments import config_files, parse_overrides, split_options
from recbole_pos.cli.main import main
from recbole_pos.errors import UsageError
from recbole_pos.yaml_files import read_yaml

SCRIPT = Path(__file__).parent.parent / "run_recbole_pos.py"
FAST = ["--epochs=1", "--hidden_size=16", "--inner_size=16", "--show_progress=false"]


def test_run_writes_a_result_and_prints_a_table(tiny: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "run"
    arguments = ["run", "-m", "FPARec", "-d", "tiny", f"--data_path={tiny}", *FAST]
    assert main([*arguments, "--run_dir", str(folder), "--learning_rate=2e-3"]) == 0
    printed = capsys.readouterr().out
    assert "epoch   0" in printed and "ndcg@10" in printed and "test" in printed
    assert json.loads((folder / "result.json").read_text())["model"] == "FPARec"
    assert "learning_rate: 0.002" in (folder / "config.yaml").read_text()


def test_config_files_and_the_default_folder(tiny: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("epochs: 3\nhidden_size: 8\n")
    (tmp_path / "b.yaml").write_text("epochs: 1\n")
    arguments = ["run", "-m", "PARec", "-d", "tiny", f"--data_path={tiny}"]
    assert main([*arguments, "--config_files", "a.yaml", "b.yaml"]) == 0
    (result,) = (tmp_path / "saved" / "tiny" / "PARec").glob("*/result.json")
    assert json.loads(result.read_text())["epochs"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "FPARec", "-d", "ml-100k", "--learing_rate=0.1"], "nearest known: learning_rate"),
        (["-m", "FPARec", "-d", "nowhere"], "dataset 'nowhere' not found"),
        (["-m", "FPARek", "-d", "ml-100k"], "did you mean FPARec"),
        (["-d", "ml-100k"], "no model (-m) given"),
        (["-m", "FPARec"], "no dataset (-d) given"),
        (["-m", "FPARec", "-d", "ml-100k", "--TIME_FIELD=when"], "field 'when' (TIME_FIELD)"),
        (["-m", "FPARec", "-d", "ml-100k", "--ITEM_ID_FIELD=rating"], "has type float"),
        (["-m", "FPARec", "-d", "ml-100k", "--epochs=many"], "epochs: expected a whole number"),
        (["-m", "FPARec", "-d", "ml-100k", "--epochs=1", "--epochs=2"], "given twice"),
        (["-m", "FPARec", "-d", "ml-100k", "--epochs"], "--key=value"),
        (["-m", "FPARec", "-d", "ml-100k", "--config_files", "no.yaml"], "cannot read"),
        (["--resume", "nowhere"], "not a run folder"),
        (["-m", "PosSASRec", "-d", "ml-100k", "--hidden_size=63"], "not a multiple of n_heads"),
        (["-m", "PosSASRec", "-d", "ml-100k", "--norm=middle"], "pre, post"),
        (["-m", "PosSASRec", "-d", "ml-100k", "--loss_type=BPR"], "loss_type"),
        (["-m", "PosSASRec", "-d", "ml-100k", "--position=[parec, fparec]"], "replaces attention"),
        (["-m", "PosSASRec", "-d", "ml-100k", "--position=[nope, rope]"], "nope stands alone"),
        (["-m", "PosSASRec", "-d", "ml-100k", "--position="], "[nope] stands for no position"),
        (["-m", "PosSASRec", "-d", "ml-100k", "--position=[[rope]]"], "unknown scheme ['rope']"),
        (["-m", "KernelAttention", "-d", "ml-100k", "--kernel_band=51"], "from 1 to"),
        (["-m", "KernelAttention", "-d", "ml-100k", "--kernel_l=band"], "toeplitz, full, identity"),
        (["-m", "PosSASRec", "-d", "ml-100k", "--position=rope", "--rope_base=1"], "above 1"),
        (["-m", "FPARec", "-d", "ml-100k", "--learning_rate=.inf"], "finite"),
        (["-m", "FPARec", "-d", "ml-100k", "--train_only=[learned]"], "init_from"),
        (["-m", "FPARec", "-d", "ml-100k", "--eval_args={split: {LS: [1]}}"], "valid_and_test"),
        (["-m", "FPARec", "-d", "ml-100k", "--eval_args={split: {RS: [a, 1, 1]}}"], "three ratios"),
        (["-m", "FPARec", "-d", "ml-100k", "--eval_args={split: {RS: [8, 1, .inf]}}"], "finite"),
        (["-m", "FPARec", "-d", "ml-100k", "--eval_args={mode: [full]}"], "eval_args.mode"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_wrong_input_is_one_message_and_exit_code_2(
    tmp_path: Path, monkeypatch, capsys, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.startswith("error: ")
    assert "Traceback" not in captured.err
    assert not list(tmp_path.iterdir())  # nothing half-made is left behind


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


def test_values_with_spaces_may_follow_lists(tmp_path: Path, monkeypatch) -> None:
    """argparse would take such a value for one more file."""
    seen = {}
    monkeypatch.setattr("recbole_pos.experiment.run.run", lambda *a, **k: seen.update(given=a))
    files = ["--config_files", "a.yaml", "b.yaml", "--eval_args={target: last}"]
    assert main(["-m", "Pop", "-d", "x", *files]) == 0
    assert seen["given"][2:] == (["a.yaml", "b.yaml"], {"eval_args": {"target": "last"}})


def test_overrides_are_yaml() -> None:
    assert parse_overrides(["--a=1e-3", "--b=[x, 2]", "--c=k=v", "--d="]) == {
        "a": 0.001,
        "b": ["x", 2],
        "c": "k=v",
        "d": None,
    }


def test_the_script_is_the_same_command(tmp_path: Path) -> None:
    arguments = ["-m", "x", "-d", "y"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, cwd=tmp_path, text=True
    )
    assert done.returncode == 2 and "unknown model 'x'" in done.stderr
    assert main(arguments) == main(["run", *arguments]) == 2


def test_names_of_config_files_may_have_spaces(tmp_path: Path) -> None:
    spaced = tmp_path / "my best.yaml"
    spaced.write_text("epochs: 1")
    assert config_files([str(spaced), "a.yaml b.yaml"]) == [str(spaced), "a.yaml", "b.yaml"]


@pytest.mark.parametrize(
    ("line", "mine", "options"),
    [
        ("-m FPARec --epochs 2 -d x", "-m FPARec -d x", "--epochs=2"),
        ("-m FPARec --epochs=2 -d x", "-m FPARec -d x", "--epochs=2"),
        ("--lambda_0 -1.5 --nproc 2", "--nproc 2", "--lambda_0=-1.5"),
        ("--config_files a.yaml b.yaml --seed 3", "--config_files a.yaml b.yaml", "--seed=3"),
        ("--quiet --topk [1,2] --log f", "--quiet --log f", "--topk=[1,2]"),
        ("--tensorboard -m FPARec", "-m FPARec", "--tensorboard"),
        ("--tensorboard --epochs 1", "", "--tensorboard --epochs=1"),
    ],
)
def test_one_syntax_on_a_line(line: str, mine: str, options: str) -> None:
    """A value may stand after = or after a space, as of the command's own options."""
    own = {"m", "d", "nproc", "config_files", "quiet", "log"}
    assert split_options(line.split(), own) == (mine.split(), options.split())


def test_a_value_after_a_space_trains(tiny: Path, tmp_path: Path) -> None:
    line = f"run -m Pop -d tiny --data_path {tiny} --topk [1,3] --valid_metric NDCG@3 --quiet"
    assert main([*line.split(), "--run_dir", str(tmp_path / "run")]) == 0
    assert set(read_yaml(tmp_path / "run" / "config.yaml")["topk"]) == {1, 3}


HEAVY = {"torch", "recbole", "ray", "matplotlib", "pandas", "scipy", "numpy"}
LIGHT = [
    "--help",
    "--version",
    "models",
    "schemes",
    "run -m FPARec --help",
    "run -m GRU4Rec --help",
]
LIGHT += [f"{name} --help" for name in ("run", "tune", "attach", "plot", "inspect", "recommend")]
LIGHT += ["serve --help"]


@pytest.mark.parametrize("line", LIGHT)
def test_what_only_tells_imports_nothing_heavy(line: str) -> None:
    """In a process of its own, as a shell starts it: half a second of CPU at most."""
    code = (
        "import sys, time; from recbole_pos.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print('\\n', time.process_time(), *sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *line.split()]
    least = 9.0
    for _ in range(5):  # a busy machine makes the same work cost more
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds, *modules = done.stderr.split()
        assert not HEAVY & set(modules) and len(done.stdout) > 10
        if (least := min(least, float(seconds))) < 0.5:
            break
    assert least < 0.5


@pytest.mark.parametrize(
    "line, rank, told",
    [
        ("run -m FPARec -d shop", "0", "recbole-pos .*: FPARec on shop\n"),
        ("-m FPARec -d shop --log LOG", "0", "recbole-pos .*: FPARec on shop\n"),
        ("run --resume saved/shop", "0", "recbole-pos .*: going on with saved/shop\n"),
        ("run --config_files", "0", "recbole-pos .*: the model of the files\n"),
        ("run -m FPARec -d shop --quiet", "0", ""),
        ("run -m FPARec -d shop --json", "0", ""),
        ("run -m FPARec -d shop", "1", ""),  # the second process of torchrun
    ],
)
def test_a_run_says_what_begins_before_torch_is_imported(
    line: str, rank: str, told: str, tmp_path: Path
) -> None:
    """What trains is replaced by the question whether anything heavy is there."""
    log, yaml = tmp_path / "log", tmp_path / "mine.yaml"
    yaml.write_text("epochs: 1\n")
    code = (
        "import sys, types; late = types.ModuleType('late')\n"
        f"late.run = lambda *a, **k: print(sorted({HEAVY} & set(sys.modules)))\n"
        "sys.modules['recbole_pos.experiment.run'] = late\n"
        "from recbole_pos.cli.main import main; main(sys.argv[1:])"
    )
    words = line.replace("LOG", str(log)).replace("_files", f"_files {yaml}").split()
    environ = {**os.environ, "RANK": rank, "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert re.fullmatch(told + r"\[\]\n", done.stdout), done
    if "LOG" in line:
        assert re.fullmatch(told, log.read_text())
