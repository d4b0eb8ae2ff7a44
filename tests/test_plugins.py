"""Models and schemes of this process, of modules, of packages; and whose code runs."""

from __future__ import annotations

import os
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from own_models import GRU, MODULE, REGISTER, call, config_of, options
from recbole.config import Config
from recbole.model.abstract_recommender import ContextRecommender, SequentialRecommender
from recbole.model.general_recommender import BPR, LightGCN
from recbole.model.sequential_recommender import SASRec
from recbole.utils import get_model, get_trainer
from torch import nn

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config import plugins
from recbole_pos.config.plugins import allow, import_plugins
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import prepare
from recbole_pos.model.fparec import FPARec
from recbole_pos.model.models import ADDED, registered_name
from recbole_pos.model.sasrec import PosSASRec
from recbole_pos.model.training import RecBoleAdapter, adapter
from recbole_pos.position.schemes import SCHEMES


def refusal(action: Any, *given: Any, **more: Any) -> str:
    with pytest.raises(UsageError) as caught:
        action(*given, **more)
    return str(caught.value)


# --- in this process ---


def test_a_class_runs_and_comes_back(tiny: Path, mine, tmp_path: Path) -> None:
    recbole_pos.register_model(mine.TinyGRU, defaults=GRU)
    given = options(tiny, gru_width=3, hidden_size=8)
    result = recbole_pos.run(mine.TinyGRU, "tiny", None, given, tmp_path / "run", verbose=False)
    model = recbole_pos.load(result.run_dir).model
    assert type(model) is mine.TinyGRU and model.gru.hidden_size == 24
    assert len(recbole_pos.recommend(result.run_dir, users=["u9"], k=3)) == 3
    assert "plugins" not in config_of(result)  # nothing that could be imported


def test_a_class_in_recboles_form_runs_without_a_word_before(
    tiny: Path, mine, tmp_path: Path
) -> None:
    """Rows, negatives, and defaults from the class."""
    given = options(tiny, state_size=4)
    result = recbole_pos.run(mine.Markov, "tiny", None, given, tmp_path / "run", verbose=False)
    made = recbole_pos.load(result.run_dir)
    assert made.model.items.embedding_dim == 4 and made.config["augmentation"] == "prefix"
    assert made.config["valid_metric"] == "NDCG@10"  # the plugin's protocol


def test_a_scheme_runs_composes_and_is_attached(tiny: Path, mine, tmp_path: Path) -> None:
    """To a run of a custom model, too."""

    class Wide(PosSASRec):
        """PosSASRec under a name of its own."""

    recbole_pos.register_scheme("recency", mine.Recency, defaults={"recency_slope": 0.5})
    given = options(tiny, position=["learned"], hidden_size=8, inner_size=8)
    first = recbole_pos.run(Wide, "tiny", None, given, tmp_path / "a", verbose=False)
    result = recbole_pos.attach(first.run_dir, ["recency"], {"recency_slope": 0.25}, verbose=False,
                                run_dir=tmp_path / "b")  # fmt: skip
    assert config_of(result)["position"] == ["learned", "recency"]
    assert config_of(result)["model"] == "Wide" and result.parameters == 2 * 2  # layers and heads
    schemes = recbole_pos.load(result.run_dir).model.trm_encoder.layer[0].multi_head_attention
    assert isinstance(schemes.position.schemes["recency"], mine.Recency)


def test_what_a_class_extends_gives_its_defaults(tiny: Path) -> None:
    class Wide(FPARec):
        defaults = {"hidden_size": 96, "of_wide": 1.5}

    class Wider(Wide):
        defaults = {"of_wider": [1, 2]}

    config = PosConfig(Wider, "tiny", None, options(tiny))
    values = [config[key] for key in ("hidden_size", "inner_size", "of_wide", "of_wider")]
    assert values == [96, 64, 1.5, [1, 2]] and config["position"] == ["learned", "fparec"]
    assert config["positional_rank"] == 40  # of its schemes

    class Mine(SASRec):
        """RecBole's yaml counts too."""

    assert PosConfig(Mine, "tiny", None, options(tiny))["n_layers"] == 2


def test_names_of_classes(tiny: Path) -> None:
    recbole_pos.register_model(FPARec, {"hidden_size": 16}, name="SmallFPARec")
    assert PosConfig("SmallFPARec", "tiny", None, options(tiny))["hidden_size"] == 16
    assert PosConfig("FPARec", "tiny", None, options(tiny))["hidden_size"] == 64
    for model in (FPARec, SASRec, BPR):
        assert PosConfig(model, "tiny", None, {"data_path": str(tiny)})["model"] == model.__name__
    assert list(ADDED) == ["SmallFPARec"] and registered_name(FPARec) == "FPARec"
    assert PosConfig(LightGCN, "tiny", None, options(tiny))["n_layers"] == 2  # not among the listed


def test_a_cell_that_runs_again_replaces_its_class(tiny: Path, mine) -> None:
    """For RecBole's own lookup, too: with the plugin's data and trainer if on its base."""
    recbole_pos.register_model(mine.TinyGRU, defaults=GRU)
    recbole_pos.register_model(mine.Markov, name="Chain")
    assert get_model("TinyGRU") is mine.TinyGRU and get_model("Chain") is mine.Markov
    assert get_trainer(None, "TinyGRU").__name__ == "PosTrainer"
    assert get_trainer(None, "Chain").__name__ == "Trainer"
    assert Config("Chain", "tiny", None, {"data_path": str(tiny)})["state_size"] == 8
    again: dict = {"__name__": "__main__"}
    exec(MODULE, again)
    config = PosConfig(again["TinyGRU"], "tiny", None, options(tiny))
    assert config.model_class is get_model("TinyGRU") is again["TinyGRU"]
    assert config["gru_width"] == 2
    recbole_pos.register_scheme("recency", mine.Recency, {"recency_slope": 1.0})
    recbole_pos.register_scheme("recency", again["Recency"], {"recency_slope": 2.0})
    assert SCHEMES["recency"] is again["Recency"]
    assert SCHEMES.defaults("recency") == {"recency_slope": 2.0}


# --- options ---


def test_wrong_options(tiny: Path, mine) -> None:
    recbole_pos.register_model(mine.TinyGRU, defaults=GRU)
    for given, named in (
        ({"gru_width": "two"}, "gru_width"),
        ({"gru_widht": 2}, "nearest known: gru_width"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"loss_type": "BPR"}, "CE, SCE"),
        ({"position": ["rope"]}, "'position'"),
    ):
        assert named in refusal(PosConfig, "TinyGRU", "tiny", None, options(tiny, **given))
    for wrong in ({"augmentation": "windows"}, {"gru_width": torch.ones(2)}):
        recbole_pos.register_model(mine.TinyGRU, {**GRU, **wrong})
        message = refusal(PosConfig, "TinyGRU", "tiny", None, options(tiny))
        assert message.startswith(f"defaults of TinyGRU: {next(iter(wrong))}")


def test_names_that_mean_something_else_to_the_plugin_are_free(tiny: Path, mine) -> None:
    """``norm`` is pre or post to a transformer, ``alpha`` at most 100 to another; not here."""
    recbole_pos.register_model(mine.TinyGRU, {**GRU, "alpha": 0.5, "norm": "l2", "n_heads": 3})
    config = PosConfig("TinyGRU", "tiny", None, options(tiny, alpha=1000, norm="l1"))
    assert config["alpha"] == 1000.0 and isinstance(config["alpha"], float)
    assert config["norm"] == "l1" and config["hidden_size"] % config["n_heads"]
    assert "norm" in refusal(PosConfig, "TinyGRU", "tiny", None, options(tiny, norm=3))
    assert "pre, post" in refusal(PosConfig, "PosSASRec", "tiny", None, options(tiny, norm="l1"))


# --- what is refused ---


class _Nothing(nn.Module):
    pass


def test_models_that_are_none(mine) -> None:
    class NoEncoder(recbole_pos.PosRecommender):
        pass

    class NoLoss(SequentialRecommender):
        def predict(self, interaction): ...

    class NoScores(SequentialRecommender):
        def calculate_loss(self, interaction): ...

    class Context(ContextRecommender):
        pass

    for model, named in (
        ("TinyGRU", "'TinyGRU'"),
        (_Nothing, "no recommender"),
        (Context, "neither a sequential nor a general"),
        (NoEncoder, "no encode and no states"),
        (NoLoss, "no calculate_loss"),
        (NoScores, "no full_sort_predict and no predict"),
    ):
        assert named in refusal(recbole_pos.register_model, model)
    for defaults in (["gru_width"], {"dataset": "tiny"}, "none.yaml"):
        assert "defaults" in refusal(recbole_pos.register_model, mine.TinyGRU, defaults=defaults)
    assert not list(ADDED)


def test_names_of_others(mine) -> None:
    class Other(recbole_pos.PosRecommender):
        def encode(self, items, ctx): ...

    recbole_pos.register_model(mine.TinyGRU, defaults=GRU)
    for name, holder in (
        ("TinyGRU", "__main__:TinyGRU"),
        ("FPARec", "recbole-pos"),
        ("SASRec", "RecBole"),
        ("LightGCN", "RecBole has a model"),
        ("my-model", "digits"),
    ):
        message = refusal(recbole_pos.register_model, Other, name=name)
        assert name in message and holder in message


def test_schemes_that_are_none(mine) -> None:
    class Misspelt(recbole_pos.AttentionPosition):
        def biass(self, q, k, ctx): ...

    class Positional(mine.Recency):
        def __init__(self, dimensions, slope):
            super().__init__(dimensions, recency_slope=slope)

    class Text(mine.Recency):
        options = "recency_slope"

    slope = {"recency_slope": 1.0}
    for name, scheme, defaults, named in (
        ("a", _Nothing, None, "recbole_pos.AttentionPosition"),
        ("a", Misspelt, None, "defines no rotate"),
        ("a", mine.Recency, None, "recency_slope has no default"),
        ("a", mine.Recency, {**slope, "b": 1}, "b has a default"),
        ("a", Positional, slope, "Positional(dimensions, recency_slope=...)"),
        ("a", Text, slope, "expected names"),
        ("rope", mine.Recency, slope, "taken by recbole-pos"),
        ("keys", mine.Recency, slope, "torch"),
        ("a b", mine.Recency, slope, "digits"),
    ):
        assert named in refusal(recbole_pos.register_scheme, name, scheme, defaults)
    assert "a" not in SCHEMES


def test_an_unknown_name_says_what_to_do(tiny: Path) -> None:
    assert "--plugins='[my_models]'" in refusal(PosConfig, "TinyGRU", "tiny", None, options(tiny))
    given = options(tiny, position=["recency"])
    assert "register_scheme first" in refusal(PosConfig, "PosSASRec", "tiny", None, given)


def test_another_class_of_a_name_of_recboles_is_not_taken_for_it(tiny: Path, mine) -> None:
    """BERT4Rec's loss and SASRec's windows are for RecBole's classes alone."""
    original = type("SASRec", (mine.Markov,), {})
    recbole_pos.register_model(original, name="OtherSASRec")
    made = prepare(PosConfig(original, "tiny", None, options(tiny)))
    assert type(adapter(made.config, made.model)) is RecBoleAdapter


def test_what_a_custom_class_does_wrong_is_named(tiny: Path, caplog) -> None:
    class Wide(PosSASRec):
        """States twice as wide as item vectors."""

        def encode(self, items, ctx):
            states = super().encode(items, ctx)
            return torch.cat((states, states), -1)

    class Forgetful(PosSASRec):
        """Reads what no one gives."""

        def __init__(self, config, dataset):
            super().__init__(config, dataset)
            self.half = 1.0 - config["forgotten_share"]

    given = {"data_path": str(tiny), "epochs": 1, "hidden_size": 16}
    message = refusal(recbole_pos.run, Wide, "tiny", config_dict=given, verbose=False)
    assert message.startswith("Wide: encode gives")
    with pytest.raises(TypeError):  # as Python raised it in that class
        recbole_pos.run(Forgetful, "tiny", config_dict={"data_path": str(tiny)}, verbose=False)
    assert "forgotten_share" in caplog.text


# --- from a module ---


def test_a_module_of_the_working_directory(
    here: Path, tiny: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_class_of_a_module_is_recorded_and_one_nobody_registered_is_found(
    here: Path, tiny: Path
) -> None:
    (here / "gru.yaml").write_text("gru_width: 5   # (int) Times hidden_size.\n")
    (here / "my_models.py").write_text(MODULE)  # registers nothing
    sys.path.insert(0, str(here))
    import my_models

    config = PosConfig(my_models.Markov, "tiny", None, options(tiny))
    assert config.plain["plugins"] == ["my_models"]
    ADDED.added.clear()
    given = options(tiny, plugins=["my_models"])
    assert PosConfig("Markov", "tiny", None, given).model_class is my_models.Markov
    # with defaults that only this process knows, its import would not be enough
    os.chdir("/")
    recbole_pos.register_model(my_models.TinyGRU, defaults="gru.yaml")  # beside the class
    config = PosConfig("TinyGRU", "tiny", None, options(tiny))
    assert "plugins" not in config.plain and config["gru_width"] == 5


@pytest.mark.parametrize(
    ("text", "given", "named"),
    [
        ("", ["no_models"], "no module 'no_models'"),
        ("import no_such_thing", ["my_models"], "ModuleNotFoundError"),
        ("1 / 0", ["my_models"], "ZeroDivisionError"),
        ("", "my_models.py", "write --plugins my_models"),
        ("", [3], "[3]"),
        ("", ["./my_models"], "modules such as"),
    ],
)
def test_wrong_plugins(here: Path, tiny: Path, text: str, given: Any, named: str) -> None:
    (here / "my_models.py").write_text(text)
    allow(given)
    message = refusal(PosConfig, "FPARec", "tiny", None, options(tiny, plugins=given))
    assert message.startswith("configuration: plugins: ") and named in message
    assert str(here) not in sys.path or text


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


def test_what_this_process_knows_is_sent_to_others(here: Path, tiny: Path, mine) -> None:
    """Its classes, and which modules the user allows, those and no others."""
    recbole_pos.register_model(mine.TinyGRU, defaults=GRU)
    allow("my_models")
    packed = plugins.pack("TinyGRU")
    assert plugins.pack("FPARec")
    plugins._allowed.clear()
    ADDED.added.clear()
    assert "--plugins" in refusal(import_plugins, ["my_models"], "config.yaml")
    plugins.unpack(packed)
    assert ADDED["TinyGRU"].__name__ == "TinyGRU" and ADDED.defaults("TinyGRU")["gru_width"] == 2
    ADDED.added.clear()
    assert import_plugins(["my_models"], "config.yaml") == ["my_models"]
    mine.TinyGRU.lock = threading.Lock()
    ADDED.added.clear()
    recbole_pos.register_model(mine.TinyGRU, defaults=GRU)
    assert "TinyGRU" in refusal(plugins.pack, "TinyGRU")


# --- of strangers ---


@pytest.fixture(scope="module")
def run_of_a_stranger(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder, and modules beside it."""
    folder = tmp_path_factory.mktemp("stranger") / "run"
    given = {**options(tiny), "hidden_size": 8, "inner_size": 8}
    recbole_pos.run("FPARec", "tiny", None, given, run_dir=folder, verbose=False)
    code = "open('ran', 'w').close()\n"
    (folder / "mine.py").write_text(code)
    (folder / "nested").mkdir()
    (folder / "nested" / "part.py").write_text(code)
    with zipfile.ZipFile(folder / "lib.zip", "w") as file:
        file.writestr("zipped.py", code)
    return folder


@pytest.fixture
def stranger(run_of_a_stranger: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, searched for modules as ``python -m`` does."""
    monkeypatch.chdir(run_of_a_stranger)
    monkeypatch.syspath_prepend("")
    yield run_of_a_stranger
    for name in ("mine", "nested", "nested.part", "zipped"):
        sys.modules.pop(name, None)
    (run_of_a_stranger / "ran").unlink(missing_ok=True)


def name_plugin(folder: Path, module: str) -> None:
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "plugins": [module]}))


READ = ["recommend", ".", "--users", "u9", "--out", "found.csv"]


@pytest.mark.parametrize(
    ("module", "path", "command"),
    [
        ("mine", "", READ),
        ("mine", "", ["run", "--resume", "."]),
        ("mine", "", ["run", "--config_files", "config.yaml", "--run_dir", "again"]),
        ("mine", ".", ["evaluate", "."]),
        ("nested.part", "", ["update", ".", "--run_dir", "later"]),
        ("zipped", "lib.zip", ["attach", ".", "kernel"]),
    ],
)
def test_a_file_does_not_choose_code(
    stranger: Path, monkeypatch, capsys, module: str, path: str, command: list[str]
) -> None:
    name_plugin(stranger, module)
    monkeypatch.setenv("PYTHONPATH", path)
    if path:
        monkeypatch.syspath_prepend(path)
    assert main(command) == 2 and "--plugins" in capsys.readouterr().err
    assert "--plugins" in refusal(recbole_pos.load, ".")
    assert not (stranger / "ran").exists()


def test_the_user_does(stranger: Path) -> None:
    name_plugin(stranger, "mine")
    assert main([*READ, "--plugins", "mine"]) == 0 and (stranger / "ran").exists()
    plugins._allowed.clear()
    recbole_pos.load(".")  # it is imported already
    name_plugin(stranger, "json.tool")  # installed
    recbole_pos.load(".")
