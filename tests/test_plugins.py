"""Models and schemes of this process, of modules, of packages; and whose code runs."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import run_python, train
from own_models import GRU, MODULE, REGISTER, config_of, options
from recbole.model.sequential_recommender import SASRec
from recbole.utils import get_model, get_trainer
from torch import nn

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config import plugins
from recbole_pos.config.plugins import allow_plugins, import_plugins
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.distributed import keep_working_directory_out
from recbole_pos.errors import UsageError
from recbole_pos.model.models import MODELS
from recbole_pos.model.sasrec import FPARec, PosSASRec
from recbole_pos.position.schemes import SCHEMES


def refusal(action: Any, *given: Any, **more: Any) -> str:
    with pytest.raises(UsageError) as caught:
        action(*given, **more)
    return str(caught.value)


# --- in this process ---


@pytest.mark.parametrize("name", ["TinyGRU", "Markov"])
def test_a_class_runs_and_comes_back(tiny: Path, mine, tmp_path: Path, name: str) -> None:
    """One on the plugin's base, and one in RecBole's form that was not registered before."""
    model = getattr(mine, name)
    more = {"gru_width": 3, "hidden_size": 8} if name == "TinyGRU" else {"state_size": 4}
    if name == "TinyGRU":
        recbole_pos.register_model(model, defaults=GRU)
    given = options(tiny, **more)
    result = recbole_pos.run(model, "tiny", None, given, tmp_path / "run", verbose=False)
    made = recbole_pos.load(result.run_dir)
    assert type(made.model) is model and made.config["valid_metric"] == "NDCG@10"
    assert len(recbole_pos.recommend(result.run_dir, users=["u9"], k=3)) == 3
    assert "plugins" not in config_of(result)  # nothing that could be imported
    size = made.model.gru.hidden_size if name == "TinyGRU" else made.model.items.embedding_dim
    assert size == (24 if name == "TinyGRU" else 4)


def test_a_scheme_runs_composes_and_is_attached(tiny: Path, mine, tmp_path: Path) -> None:
    """To a run of a custom model, too."""
    wide = type("Wide", (PosSASRec,), {})
    recbole_pos.register_scheme("recency", mine.Recency, defaults={"recency_slope": 0.5})
    given = options(tiny, position=["learned"], hidden_size=8, inner_size=8)
    first = recbole_pos.run(wide, "tiny", None, given, tmp_path / "a", verbose=False)
    where = {"run_dir": tmp_path / "b", "verbose": False}
    result = recbole_pos.attach(first.run_dir, ["recency"], {"recency_slope": 0.25}, **where)
    assert config_of(result)["position"] == ["learned", "recency"]
    assert config_of(result)["model"] == "Wide" and result.parameters == 2 * 2  # layers and heads
    schemes = recbole_pos.load(result.run_dir).model.trm_encoder.layer[0].multi_head_attention
    assert isinstance(schemes.position.schemes["recency"], mine.Recency)


def test_defaults_come_from_what_a_class_extends(tiny: Path) -> None:
    wide = type("Wide", (FPARec,), {"defaults": {"hidden_size": 96, "of_wide": 1.5}})
    wider = type("Wider", (wide,), {"defaults": {"of_wider": [1, 2]}})
    config = PosConfig(wider, "tiny", None, options(tiny))
    values = [config[key] for key in ("hidden_size", "inner_size", "of_wide", "of_wider")]
    assert values == [96, 64, 1.5, [1, 2]] and config["position"] == ["learned", "fparec"]
    assert config["positional_rank"] == 40  # of its schemes
    of_recbole = type("Mine", (SASRec,), {})  # RecBole's yaml counts, too
    assert PosConfig(of_recbole, "tiny", None, options(tiny))["n_layers"] == 2


def test_a_cell_that_runs_again_replaces_its_class(tiny: Path, mine) -> None:
    """For RecBole's own lookup, too: with the plugin's data and trainer if on its base."""
    recbole_pos.register_model(mine.TinyGRU, defaults=GRU)
    recbole_pos.register_model(mine.Markov, name="Chain")
    assert get_model("TinyGRU") is mine.TinyGRU and get_model("Chain") is mine.Markov
    trainers = [get_trainer(None, name).__name__ for name in ("TinyGRU", "Chain")]
    assert trainers == ["PosTrainer", "Trainer"]
    again: dict = {"__name__": "__main__"}
    exec(MODULE, again)
    config = PosConfig(again["TinyGRU"], "tiny", None, options(tiny))
    assert config.model_class is get_model("TinyGRU") is again["TinyGRU"]
    for scheme, slope in ((mine.Recency, 1.0), (again["Recency"], 2.0)):
        recbole_pos.register_scheme("recency", scheme, {"recency_slope": slope})
        assert SCHEMES["recency"] is scheme
        assert SCHEMES.defaults("recency") == {"recency_slope": slope}


# --- what is refused ---


def test_wrong_options(tiny: Path, mine) -> None:
    recbole_pos.register_model(mine.TinyGRU, defaults=GRU)
    for given, named in (
        ({"gru_width": "two"}, "gru_width"),
        ({"gru_widht": 2}, "did you mean gru_width"),
        ({"position": ["rope"]}, "'position'"),
    ):
        assert named in refusal(PosConfig, "TinyGRU", "tiny", None, options(tiny, **given))
    given = options(tiny, position=["recency"])
    assert "register_scheme first" in refusal(PosConfig, "PosSASRec", "tiny", None, given)


def test_names_that_mean_something_else_to_the_plugin_are_free(tiny: Path, mine) -> None:
    """``norm`` is pre or post to a transformer, ``alpha`` at most 100 to another; not here."""
    recbole_pos.register_model(mine.TinyGRU, {**GRU, "alpha": 0.5, "norm": "l2"})
    config = PosConfig("TinyGRU", "tiny", None, options(tiny, alpha=1000, norm="l1"))
    assert isinstance(config["alpha"], float) and config["norm"] == "l1"
    assert "norm" in refusal(PosConfig, "TinyGRU", "tiny", None, options(tiny, norm=3))
    assert "pre, post" in refusal(PosConfig, "PosSASRec", "tiny", None, options(tiny, norm="l1"))


def test_classes_that_are_no_models_are_refused(mine) -> None:
    assert "no recommender" in refusal(recbole_pos.register_model, nn.Linear)
    for name, holder in (("FPARec", "recbole-pos"), ("SASRec", "RecBole"), ("my-model", "digits")):
        message = refusal(recbole_pos.register_model, mine.Markov, name=name)
        assert name in message and holder in message
    assert not MODELS.added


def test_classes_that_are_no_schemes_are_refused(mine) -> None:
    misspelt = type("Misspelt", (recbole_pos.AttentionPosition,), {"biass": None})
    for name, scheme, named in (
        ("a", nn.Linear, "recbole_pos.AttentionPosition"),
        ("a", misspelt, "defines no rotate"),
        ("a", mine.Recency, "recency_slope has no default"),
    ):
        assert named in refusal(recbole_pos.register_scheme, name, scheme)


@pytest.mark.parametrize(
    ("key", "beside"),
    [("rope_base", "rope"), ("learning_rate", "nope"), ("recency_slope", "recency")],
    ids=["of a scheme", "of every run", "of another registration"],
)
def test_an_option_belongs_to_one_scheme(tiny: Path, mine, key: str, beside: str) -> None:
    """Its default would silently be that of what else reads the key."""
    given = {"__init__": lambda self, sizes, **options: None, "options": (key,)}
    scheme = type("Other", (mine.Recency,), given)
    recbole_pos.register_scheme("recency", mine.Recency, {"recency_slope": 1.0})
    recbole_pos.register_scheme("other", scheme, {key: 5.0})
    for position in ([beside, "other"], ["other", beside]):
        config = options(tiny, position=position)
        assert f"position: {key}" in refusal(PosConfig, "PosSASRec", "tiny", None, config)


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        ("calculate_loss", lambda self, rows: self(rows)),
        ("full_sort_predict", lambda self, rows: self.next(rows["item_length"]).T),
    ],
)
def test_what_a_custom_model_computes_is_checked(tiny, mine, here, method: str, wrong) -> None:
    """Scores in another order would be ranked as if they were those of the rows."""
    odd = type("Odd", (mine.Markov,), {method: wrong})
    message = refusal(recbole_pos.run, odd, "tiny", None, options(tiny), verbose=False)
    assert message.startswith("Odd") and "expected" in message and "found" in message


def test_a_loss_of_rows_is_not_passed_over(tiny: Path, here: Path) -> None:
    """Windows have a loss of their own, which such a class does not define."""

    class OwnLoss(PosSASRec):
        def calculate_loss(self, interaction):
            return 0 * super().calculate_loss(interaction)

    given = options(tiny, hidden_size=16)
    message = refusal(recbole_pos.run, OwnLoss, "tiny", config_dict=given, verbose=False)
    assert message.startswith("augmentation: OwnLoss") and "prefix" in message
    given["augmentation"] = "prefix"
    recbole_pos.run(OwnLoss, "tiny", config_dict=given, run_dir="run", verbose=False)
    assert json.loads(Path("run", "metrics.jsonl").read_text())["loss"] == 0


# --- from a module ---


def test_a_module_of_the_working_directory(here: Path, tiny: Path, capsys, monkeypatch) -> None:
    """Found where the user names it, recorded once, and its names may stand where names stand."""
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["models", "--plugins=[my_models]"]) == main(["schemes", "--plugins", "my_models"])
    assert main(["run", "-m", "TinyGRU", "--plugins=[my_models]", "--help"]) == 0
    printed = capsys.readouterr().out
    for text in ("A GRU over the history", "recency_slope", "gru_width", "Standard deviation of"):
        assert text in printed
    (here / "run.yaml").write_text("plugins: [my_models]\nfor:\n  TinyGRU: {gru_width: 4}\n")
    config = PosConfig("TinyGRU", "tiny", ["run.yaml"], options(tiny))
    assert config["gru_width"] == 4 and config.plain["plugins"] == ["my_models"]
    for position, wanted in (["recency"], ["my_models"]), (["rope"], None):  # where it is used
        plain = PosConfig("PosSASRec", "tiny", None, options(tiny, position=position)).plain
        assert plain.get("plugins") == wanted


def test_a_class_of_a_module_is_recorded(here: Path, tiny: Path) -> None:
    """And one that the module does not register is found in it."""
    (here / "my_models.py").write_text(MODULE)
    sys.path.insert(0, str(here))
    import my_models

    config = PosConfig(my_models.Markov, "tiny", None, options(tiny))
    assert config.plain["plugins"] == ["my_models"]
    MODELS.added.clear()
    config = PosConfig("Markov", "tiny", None, options(tiny, plugins=["my_models"]))
    assert config.model_class is my_models.Markov
    # with defaults that only this process knows, its import would not be enough
    recbole_pos.register_model(my_models.TinyGRU, defaults={"gru_width": 5})
    config = PosConfig("TinyGRU", "tiny", None, options(tiny))
    assert "plugins" not in config.plain and config["gru_width"] == 5


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
    run_python("script.py", cwd=tmp_path)
    assert (tmp_path / "gru" / "result.json").is_file()


def test_what_this_process_knows_is_sent_to_others(here: Path, mine) -> None:
    """Its classes, and which modules the user allows, those and no others."""
    recbole_pos.register_model(mine.TinyGRU, defaults=GRU)
    allow_plugins("my_models")
    packed = plugins.pack("TinyGRU")
    plugins._allowed.clear()
    MODELS.added.clear()
    assert "--plugins" in refusal(import_plugins, ["my_models"], "config.yaml")
    plugins.unpack(packed)
    assert MODELS["TinyGRU"].__name__ == "TinyGRU" and MODELS.defaults("TinyGRU")["gru_width"] == 2
    MODELS.added.clear()
    assert import_plugins(["my_models"], "config.yaml") == ["my_models"]


# --- of strangers ---


@pytest.fixture
def stranger(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run folder with modules, and as the working directory, which is searched for modules."""
    train(tiny, tmp_path)
    (tmp_path / "nested").mkdir()
    for file in ("mine.py", "nested/part.py"):
        (tmp_path / file).write_text("open('ran', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    yield tmp_path
    for name in ("nested", "nested.part"):
        sys.modules.pop(name, None)


def name_plugin(module: str) -> None:
    file = Path("config.yaml")
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "plugins": [module]}))


READ = ["recommend", ".", "--users", "u9", "--out", "found.csv"]


def test_a_file_does_not_choose_code(stranger: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("PYTHONPATH", ".")
    for module, command in (
        ("mine", READ),
        ("mine", ["run", "--config_files", "config.yaml", "--run_dir", "again"]),
        ("nested.part", ["update", ".", "--run_dir", "later"]),
    ):
        name_plugin(module)
        assert main(command) == 2 and "--plugins" in capsys.readouterr().err
    assert "--plugins" in refusal(recbole_pos.load, ".")
    assert not (stranger / "ran").exists()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="it has no PYTHONSAFEPATH")
def test_processes_import_nothing_from_the_working_directory(stranger: Path) -> None:
    """Python would search it before installed packages; Ray's processes: test_study_driver.py."""
    for module in ("numpy", "pickle", "multiprocessing", "recbole_pos"):
        shutil.copy("mine.py", f"{module}.py")
    with keep_working_directory_out():
        run_python("-c", "import pickle")
    assert not (stranger / "ran").exists()


def test_code_that_the_user_names_runs(stranger: Path) -> None:
    name_plugin("mine")
    assert main([*READ, "--plugins", "mine"]) == 0 and (stranger / "ran").exists()
    plugins._allowed.clear()
    recbole_pos.load(".")  # it is imported already
    name_plugin("json.tool")  # installed
    recbole_pos.load(".")


def test_the_lists_of_a_run_with_code_of_the_user_are_scored(stranger: Path) -> None:
    name_plugin("mine")
    assert main(["lists", ".", "--out", "lists.csv", "-k", "5", "--plugins", "mine"]) == 0
    plugins._allowed.clear()
    assert main(["score", "lists.csv", "--runs", ".", "--plugins", "mine"]) == 0
