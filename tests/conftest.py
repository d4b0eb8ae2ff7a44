"""Shared fixtures: a small generated dataset, and models built from the real yaml files."""

import functools
import gc
import importlib.metadata
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

gc.disable()  # until all is imported, see pytest_collection
os.fsync = lambda file: None  # no test cuts the power
importlib.metadata.version = functools.cache(importlib.metadata.version)  # every run asks for five

import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

# the models here are tiny: a second thread only waits, the more so beside other test processes
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray's workers give way to everything else, which on a busy machine leaves them next to nothing
os.environ.setdefault("RAY_worker_niceness", "0")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # it was imported with the others
sys.argv = sys.argv[:1]  # RecBole's own Config reads it, and would take pytest's flags

from own_models import MODULE, REGISTER  # noqa: E402

import recbole_pos  # noqa: E402
from recbole_pos.cli.main import main  # noqa: E402
from recbole_pos.config import plugins  # noqa: E402
from recbole_pos.config.posconfig import PosConfig  # noqa: E402
from recbole_pos.errors import UnknownKey  # noqa: E402
from recbole_pos.experiment.build import Experiment, prepare  # noqa: E402
from recbole_pos.model.models import MODELS  # noqa: E402
from recbole_pos.position.schemes import SCHEMES  # noqa: E402

SMALL = {"hidden_size": 16, "inner_size": 16, "MAX_ITEM_LIST_LENGTH": 12, "train_batch_size": 16}
SMALL |= {"epochs": 2, "show_progress": False}


# options under which a model of the plugin trains on its targets' cross-entropy alone
CROSS_ENTROPY = {"AttrFormer": {"prior_weight": 0.0, "future_weights": [1.0]}}


def small(
    model: str, dataset: str = "tiny", sizes: dict[str, Any] = SMALL, **options: Any
) -> PosConfig:
    """A configuration with small sizes, as far as the model reads them."""
    sizes = dict(sizes)
    while True:
        try:
            return PosConfig(model, dataset, None, {**sizes, **options})
        except UnknownKey as error:
            if error.key in options:
                raise
            del sizes[error.key]


def train(data: Path, run_dir: Path, model: str = "FPARec", **options: Any) -> Path:
    """The folder of a run with small sizes, of one epoch."""
    given = {"data_path": str(data), "epochs": 1, **CROSS_ENTROPY.get(model, {}), **options}
    given = small(model, **given).external_config_dict
    recbole_pos.run(model, "tiny", None, given, run_dir=run_dir, verbose=False)
    return run_dir


def load_script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``studies/NAME.py``, under the name by which others there import it."""
    path = SCRIPT.parent / "studies" / f"{name}.py"
    monkeypatch.syspath_prepend(str(SCRIPT.parent / "studies"))  # page_parts.py
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if path.stem not in sys.stdlib_module_names:  # posrec/encodings must not hide Python's codecs
        monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


PATIENCE = 300  # seconds, on a machine that has other things to do
SCRIPT = Path(__file__).parent.parent / "run_recbole_pos.py"


def wait(what: Callable[[], Any]) -> Any:
    """The first value of ``what`` that is true."""
    deadline = time.time() + PATIENCE
    while time.time() < deadline:
        if value := what():
            return value
        time.sleep(0.01)
    pytest.fail("waited in vain")


def run_python(*words: str | Path, cwd: Path | None = None, **environment: str) -> str:
    """What Python prints in a fresh process, which must end well."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fork(action: Callable[[], Any], stdout: int | None = None) -> subprocess.CompletedProcess[str]:
    """How an action ends in a process that is forked from this one, which has imported everything.

    Args:
        action: returns the exit code, as ``main`` does, or raises.
        stdout: a file descriptor; when None, what is written is returned.

    Returns:
        The exit code, negative for a signal; what was written.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        pid = os.fork()
        if not pid:
            code = 120
            signal.alarm(PATIENCE)
            try:
                os.dup2(out.fileno() if stdout is None else stdout, 1)
                os.dup2(errors.fileno(), 2)
                sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
                try:
                    code = action() or 0
                except SystemExit as ended:
                    code = int(ended.code or 0)
                sys.stdout.flush()  # as Python does at exit
            except BaseException:
                code = 120
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess([], code, out.read(), errors.read())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz", action="store_true", help="every generated case, not a sample")


# Files whose tests start processes, Ray or environments, or train and draw a great deal: most of
# the time of them all. The longest first: one process takes a file, whose fixtures are made once.
SLOW = """
    study_driver tune.py export.py tune_faults pages readme stops device.py
    pictures serve_http wheel recommend.py recbole_doors successive tune_space
    trainer ray_clusters update recbole_ compile
    convert tables launch cache evaluate tune options moved_runs
    splits study_statistics study_report fuzz loading bench run_device
    parts item_index local_runs valid_users
""".split()


def place(path: Path) -> int:
    """Which of the slow files it is; their number for none of them."""
    starts = (path.name.startswith(f"test_{name}") for name in SLOW)
    return next((number for number, found in enumerate(starts) if found), len(SLOW))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What is left out anyhow is not imported."""
    return "not slow" in config.option.markexpr and place(collection_path) < len(SLOW) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported stays: to look for garbage in it, then and later, takes seconds."""
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long first, so that no process is left with it while the others have nothing."""
    items.sort(key=lambda item: place(item.path))
    for item in items:
        if place(item.path) < len(SLOW):
            item.add_marker("slow")


# Files that study or search on ``cluster``, in one process one after another: a Ray of each would
# start two workers, which import torch and RecBole.
STUDIES = ("study_driver.", "study_packed.", "pages.", "tune.", "valid_users.")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of ``--dist loadfile``: a process takes a file, or all of these."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LoadFiles(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name = nodeid.removeprefix("tests/test_")
            return "studies" if name.startswith(STUDIES) else super()._split_scope(nodeid)

    return LoadFiles(config, log)


def make_log(seed: int = 0, users: int = 60, items: int = 40, longest: int = 25) -> pd.DataFrame:
    """A random log with ties in time and users of every length from 1 on."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, users)
    lengths[:4] = [1, 2, 3, 4]
    user = np.repeat(np.arange(users), lengths)
    frame = pd.DataFrame(
        {
            "user_id": [f"u{u}" for u in user],
            "item_id": [f"i{i}" for i in rng.integers(0, items, len(user))],
            "timestamp": 1.5e9 + rng.integers(0, 200, len(user)),
        }
    )
    return frame.sample(frac=1, random_state=seed, ignore_index=True)


def write_atomic(
    frame: pd.DataFrame, folder: Path, name: str = "tiny", token_columns: Sequence[str] = ()
) -> Path:
    """Write folder/<name>/<name>.inter; returns folder (the data_path)."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    kinds = dict.fromkeys(("user_id", "session_id", "item_id", *token_columns), "token")
    header = {column: f"{column}:{kinds.get(column, 'float')}" for column in frame}
    frame.rename(columns=header).to_csv(folder / name / f"{name}.inter", sep="\t", index=False)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """data_path of the dataset ``tiny``."""
    return write_atomic(make_log(), tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def trained(tiny, tmp_path_factory) -> Callable[..., Path]:
    """``trained(model, **options)``: the folder of a small run on ``tiny``, trained once a session.

    Tests that change the folder copy it.
    """
    runs: dict[str, Path] = {}

    def train_once(model: str, **options: Any) -> Path:
        key = f"{model} {sorted(options.items())}"
        if key not in runs:
            runs[key] = train(tiny, tmp_path_factory.mktemp(model) / "run", model, **options)
        return runs[key]

    return train_once


@pytest.fixture
def refused(capsys) -> Callable[..., str]:
    """``refused(words, *named)``: exit code 2, and one short line that has these in it."""

    def run_command(words: str | Sequence[Any], *named: str) -> str:
        words = words.split() if isinstance(words, str) else list(map(str, words))
        capsys.readouterr()
        assert main(words) == 2, words
        line = capsys.readouterr().err
        assert line.startswith("error: ") and line.count("\n") == 1 and len(line) < 1000, line
        assert all(name in line for name in named), line
        return line

    return run_command


@pytest.fixture(scope="session")
def notes_of_workers(tmp_path_factory) -> Iterator[Path]:
    """What the processes of the Ray below note, see spy.py; ends it with the session."""
    file = tmp_path_factory.mktemp("spy") / "notes"
    file.touch()
    yield file
    if ray := sys.modules.get("ray"):
        ray.shutdown()


@pytest.fixture(scope="module")
def cluster(notes_of_workers) -> Path:
    """One Ray for the searches and studies of a session, with warm processes; what they note."""
    import ray
    from spy import install_spy

    if not ray.is_initialized():
        ray.init(
            "local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 * 2**20,
            runtime_env={"worker_process_setup_hook": install_spy(str(notes_of_workers))},
            # Ray ends idle processes after a second; a new one imports torch for six
            _system_config={"idle_worker_killing_time_threshold_ms": 600_000},
        )
    return notes_of_workers


@pytest.fixture
def trains_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``compare`` train in the process of the test, without a start and a wait."""
    from recbole_pos.runs.training_runs import LocalRuns, train_run
    from recbole_pos.study import comparing, dispatcher

    class RunsHere(LocalRuns):
        def __init__(self) -> None:
            pass

        def share(self, data: Any) -> Any:
            return data

        def start(self, **arguments: Any) -> Any:
            return functools.partial(train_run, **arguments)

        def wait(self, runs: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
            yield from [(run, run()) for run in list(runs)]

        def cancel(self, runs: Any) -> None:
            pass

    monkeypatch.setattr(comparing, "start_server", lambda: None)
    monkeypatch.setattr(dispatcher, "can_run_here", lambda *_: True)
    monkeypatch.setattr(dispatcher, "LocalRuns", RunsHere)


@pytest.fixture
def no_ray() -> Iterator[None]:
    """For a test that starts a Ray of its own, which ends with it."""
    import ray

    ray.shutdown()
    yield
    ray.shutdown()


@pytest.fixture
def experiment(tiny) -> Callable[..., Experiment]:
    """``experiment(model, **options)`` on the tiny dataset, with small sizes."""

    def build(model: str, dataset: str = "tiny", **options: Any) -> Experiment:
        return prepare(small(model, dataset, **{"data_path": str(tiny), **options}))

    return build


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Models and schemes that a test registers, or imports to do so, are gone after it."""
    kept, path = [(table, dict(table.added)) for table in (MODELS, SCHEMES)], list(sys.path)
    root, level = logging.root, logging.root.level
    handlers = list(root.handlers)
    yield
    root.setLevel(level)  # RecBole's functions configure it
    for handler in root.handlers[:]:
        if handler not in handlers and type(handler).__module__ != "_pytest.logging":
            root.removeHandler(handler)
    plugins._allowed.clear()
    for table, added in kept:
        table.added = added
    sys.path[:] = path
    for name in ("mine", "my_models", "my_package", "my_package.parts"):
        sys.modules.pop(name, None)


@pytest.fixture
def mine() -> SimpleNamespace:
    """The classes of own_models.py, as those of a notebook: nothing can import them."""
    names: dict = {"__name__": "__main__"}
    exec(MODULE, names)
    return SimpleNamespace(**{name: names[name] for name in ("TinyGRU", "Markov", "Recency")})


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A working directory with my_models.py in it."""
    (tmp_path / "my_models.py").write_text(MODULE + REGISTER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def double() -> Iterator[None]:
    """Float64 by default, and a fixed seed."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
