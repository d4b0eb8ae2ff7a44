"""Models and schemes of one's own: of this process, a script, a module, a package."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from recbole.model.general_recommender import BPR, LightGCN
from recbole.model.sequential_recommender import SASRec
from torch import nn

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import prepare
from recbole_pos.model.fparec import FPARec
from recbole_pos.model.models import ADDED, name_of
from recbole_pos.model.sasrec import PosSASRec
from recbole_pos.model.training import Rows, adapter
from recbole_pos.position.schemes import SCHEMES, scheme_names
from recbole_pos.tables import Table

SMALL = {"epochs": 1, "show_progress": False, "MAX_ITEM_LIST_LENGTH": 12}
# A module as a person writes one: a model, a model in RecBole's form, and a scheme.
MODULE = '''
import recbole_pos
import torch
from recbole.model.abstract_recommender import SequentialRecommender
from recbole.model.loss import BPRLoss
from torch import nn


class TinyGRU(recbole_pos.PosRecommender):
    """A GRU over the history."""

    def __init__(self, config, dataset):
        super().__init__(config, dataset)
        d = config["hidden_size"]
        self.gru = nn.GRU(d, d * config["gru_width"])
        self.back = nn.Linear(d * config["gru_width"], d)
        self.init_weights()

    def encode(self, items, ctx):
        x = ctx.pad(self.item_embedding(items), "start").transpose(0, 1)
        return self.back(ctx.unpad(self.gru(x)[0].transpose(0, 1), "start"))


class Markov(SequentialRecommender):
    """The last item alone, in RecBole's form."""

    defaults = {"state_size": 8, "loss_type": "BPR", "norm": "l2"}

    def __init__(self, config, dataset):
        super().__init__(config, dataset)
        assert config["norm"] in ("l1", "l2")
        self.items = nn.Embedding(self.n_items, config["state_size"], padding_idx=0)
        self.next = nn.Embedding(self.n_items, config["state_size"], padding_idx=0)

    def forward(self, rows):
        last = rows[self.ITEM_SEQ_LEN] - 1
        return self.items(rows[self.ITEM_SEQ].gather(1, last[:, None])[:, 0])

    def calculate_loss(self, interaction):
        items = (interaction[self.POS_ITEM_ID], interaction[self.NEG_ITEM_ID])
        return BPRLoss()(*((self(interaction) * self.next(item)).sum(-1) for item in items))

    def predict(self, interaction):
        return (self(interaction) * self.next(interaction[self.ITEM_ID])).sum(-1)

    def full_sort_predict(self, interaction):
        return self(interaction) @ self.next.weight.T


class Recency(recbole_pos.AttentionPosition):
    """Logits fall with distance."""

    options = ("recency_slope",)

    def __init__(self, dimensions, *, recency_slope):
        super().__init__()
        self.slope = nn.Parameter(torch.full((dimensions.n_heads, 1, 1), recency_slope))

    def bias(self, q, k, ctx):
        position = torch.arange(ctx.width, device=q.device)
        return -self.slope * (position[:, None] - position[None, :]).clamp(min=0)
'''
REGISTER = """
recbole_pos.register_model(TinyGRU, defaults={"gru_width": 2})
recbole_pos.register_scheme("recency", Recency, defaults={"recency_slope": 1.0})
"""
GRU = {"gru_width": 2}


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    """What a test imports is gone after it."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in ("my_models", "my_package", "my_package.parts"):
        sys.modules.pop(name, None)


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The classes of the module above, as those of a notebook: nothing can import them."""
    names: dict = {"__name__": "__main__"}
    exec(MODULE, names)
    return SimpleNamespace(**{name: names[name] for name in ("TinyGRU", "Markov", "Recency")})


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with my_models.py in it."""
    (tmp_path / "my_models.py").write_text(MODULE + REGISTER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options(tiny: Path, **more) -> dict:
    return {**SMALL, "data_path": str(tiny), **more}


def config_of(result) -> dict:
    return yaml.safe_load(Path(result.run_dir, "config.yaml").read_text())


def call(folder: Path, *command: str) -> str:
    """A fresh process; what it said."""
    environment = {**os.environ, "PYTHONPATH": str(Path(recbole_pos.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# --- in this process ---


def test_a_class_runs_and_comes_back(tiny: Path, mine, tmp_path: Path) -> None:
    recbole_pos.register_model(mine.TinyGRU, defaults=GRU)
    given = options(tiny, gru_width=3, hidden_size=8)
    result = recbole_pos.run(mine.TinyGRU, "tiny", None, given, tmp_path / "run", verbose=False)
    assert result.model == "TinyGRU" and result.test["ndcg@10"] >= 0
    model = recbole_pos.load(result.run_dir).model
    assert type(model) is mine.TinyGRU and model.gru.hidden_size == 24
    assert len(recbole_pos.recommend(result.run_dir, users=["u9"], k=3)) == 3
    assert "plugins" not in config_of(result)  # nothing that could be imported


def test_a_class_in_recboles_form_runs_without_a_word_before(
    tiny: Path, mine, tmp_path: Path
) -> None:
    """Rows, negatives, and defaults from the class."""
    result = recbole_pos.run(
        mine.Markov, "tiny", None, options(tiny, state_size=4), tmp_path / "run", verbose=False
    )
    made = recbole_pos.load(result.run_dir)
    assert made.model.items.embedding_dim == 4 and made.config["augmentation"] == "prefix"
    assert made.config["valid_metric"] == "NDCG@10"  # the plugin's protocol
    assert len(recbole_pos.recommend(result.run_dir, users=["u9"], k=3)) == 3


def test_a_scheme_runs_composes_and_is_attached(tiny: Path, mine, tmp_path: Path) -> None:
    recbole_pos.register_scheme("recency", mine.Recency, defaults={"recency_slope": 0.5})
    given = options(tiny, position=["learned"], hidden_size=8, inner_size=8)
    first = recbole_pos.run("PosSASRec", "tiny", None, given, tmp_path / "a", verbose=False)
    result = recbole_pos.attach(first.run_dir, ["recency"], {"recency_slope": 0.25}, verbose=False,
                                run_dir=tmp_path / "b")  # fmt: skip
    assert config_of(result)["position"] == ["learned", "recency"]
    assert result.parameters == 2 * 2  # layers and heads
    schemes = recbole_pos.load(result.run_dir).model.trm_encoder.layer[0].multi_head_attention
    assert isinstance(schemes.position.schemes["recency"], mine.Recency)


def test_an_own_model_starts_from_a_run(tiny: Path, tmp_path: Path) -> None:
    class Wide(PosSASRec):
        """PosSASRec under a name of its own."""

    given = options(tiny, hidden_size=8, inner_size=8)
    first = recbole_pos.run(Wide, "tiny", None, given, tmp_path / "a", verbose=False)
    second = recbole_pos.attach(first.run_dir, ["kernel"], verbose=False, run_dir=tmp_path / "b")
    assert config_of(second)["model"] == "Wide"


def test_what_a_class_extends_gives_its_defaults(tiny: Path) -> None:
    class Wide(FPARec):
        defaults = {"hidden_size": 96, "of_wide": 1.5}

    class Wider(Wide):
        defaults = {"of_wider": [1, 2]}

    config = PosConfig(Wider, "tiny", None, options(tiny))
    found = [config[key] for key in ("hidden_size", "inner_size", "of_wide", "of_wider")]
    assert found == [96, 64, 1.5, [1, 2]] and config["position"] == ["learned", "fparec"]
    assert config["positional_rank"] == 40  # of its schemes

    class Mine(SASRec):
        """RecBole's yaml counts too."""

    assert PosConfig(Mine, "tiny", None, options(tiny))["n_layers"] == 2


def test_one_class_under_two_names(tiny: Path) -> None:
    recbole_pos.register_model(FPARec, {"hidden_size": 16}, name="SmallFPARec")
    assert PosConfig("SmallFPARec", "tiny", None, options(tiny))["hidden_size"] == 16
    assert PosConfig("FPARec", "tiny", None, options(tiny))["hidden_size"] == 64
    assert name_of(FPARec) == "FPARec"


def test_classes_of_the_plugin_and_of_recbole_go_by_their_names(tiny: Path) -> None:
    for model in (FPARec, SASRec, BPR):
        assert PosConfig(model, "tiny", None, options(tiny))["model"] == model.__name__
    assert not list(ADDED)
    assert PosConfig(LightGCN, "tiny", None, options(tiny))["n_layers"] == 2  # not among the listed


def test_defaults_in_a_yaml_file_beside_the_class(
    here: Path, tiny: Path, tmp_path_factory, monkeypatch
) -> None:
    (here / "gru.yaml").write_text("gru_width: 5   # (int) Times hidden_size.\n")
    (here / "my_models.py").write_text(
        MODULE + "recbole_pos.register_model(TinyGRU, defaults='gru.yaml')\n"
    )
    monkeypatch.syspath_prepend(here)
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    config = PosConfig("TinyGRU", "tiny", None, options(tiny, plugins="my_models"))
    assert config["gru_width"] == 5 and config["loss_type"] == "CE"
    with pytest.raises(UsageError, match="no file none.yaml in"):
        recbole_pos.register_model(sys.modules["my_models"].TinyGRU, defaults="none.yaml")


def test_a_cell_that_runs_again_replaces_its_class(tiny: Path, mine) -> None:
    again: dict = {"__name__": "__main__"}
    exec(MODULE, again)
    recbole_pos.register_model(mine.TinyGRU, defaults=GRU)
    recbole_pos.register_model(mine.TinyGRU, defaults=GRU)
    config = PosConfig(again["TinyGRU"], "tiny", None, options(tiny))
    assert config.model_class is again["TinyGRU"] and config["gru_width"] == 2
    recbole_pos.register_scheme("recency", mine.Recency, {"recency_slope": 1.0})
    recbole_pos.register_scheme("recency", again["Recency"], {"recency_slope": 2.0})
    assert SCHEMES["recency"] is again["Recency"]
    assert SCHEMES.defaults("recency") == {"recency_slope": 2.0}


def test_recbole_finds_them_too(tiny: Path, mine, monkeypatch) -> None:
    """``run_recbole(model="TinyGRU")``: with the plugin's data and trainer if on its base."""
    from recbole.config import Config
    from recbole.utils import get_model, get_trainer

    recbole_pos.register_model(mine.TinyGRU, defaults=GRU)
    recbole_pos.register_model(mine.Markov, name="Chain")
    assert get_model("TinyGRU") is mine.TinyGRU and get_model("Chain") is mine.Markov
    assert get_trainer(None, "TinyGRU").__name__ == "PosTrainer"
    assert get_trainer(None, "Chain").__name__ == "Trainer"
    for name, key, value in (("TinyGRU", "gru_width", 2), ("Chain", "state_size", 8)):
        config = Config(name, "tiny", None, {"data_path": str(tiny), "train_neg_sample_args": None}
                        if name == "TinyGRU" else {"data_path": str(tiny)})  # fmt: skip
        assert config[key] == value
    again: dict = {"__name__": "__main__"}
    exec(MODULE, again)
    recbole_pos.register_model(again["TinyGRU"], defaults=GRU)
    assert get_model("TinyGRU") is again["TinyGRU"]


def test_under_for_in_a_file_of_several_models(tiny: Path, mine, tmp_path: Path) -> None:
    recbole_pos.register_model(mine.TinyGRU, defaults=GRU)
    recbole_pos.register_scheme("recency", mine.Recency, defaults={"recency_slope": 1.0})
    file = tmp_path / "all.yaml"
    file.write_text("for:\n  TinyGRU: {gru_width: 4}\n  recency: {recency_slope: 3.0}\n")
    assert PosConfig("TinyGRU", "tiny", [str(file)], options(tiny))["gru_width"] == 4
    given = options(tiny, position=["recency"])
    assert PosConfig("PosSASRec", "tiny", [str(file)], given)["recency_slope"] == 3


# --- options ---


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"gru_width": "two"}, "gru_width: expected a whole number"),
        ({"gru_widht": 2}, r"unknown key 'gru_widht'; nearest known: gru_width.*register_model"),
        ({"hidden_size": 0}, "hidden_size must be at least 1"),
        ({"loss_type": "BPR"}, "loss_type: 'BPR' is not one of CE, SCE"),
        ({"position": ["rope"]}, "unknown key 'position'"),
    ],
)
def test_wrong_options(tiny: Path, mine, given: dict, wanted: str) -> None:
    recbole_pos.register_model(mine.TinyGRU, defaults=GRU)
    with pytest.raises(UsageError, match=wanted):
        PosConfig("TinyGRU", "tiny", None, options(tiny, **given))


def test_names_that_mean_something_else_to_the_plugin_are_free(tiny: Path, mine) -> None:
    """``norm`` is pre or post to a transformer, ``alpha`` at most 100 to another; not here."""
    recbole_pos.register_model(mine.TinyGRU, {**GRU, "alpha": 0.5, "norm": "l2", "n_heads": 3})
    config = PosConfig("TinyGRU", "tiny", None, options(tiny, alpha=1000, norm="l1"))
    assert config["alpha"] == 1000.0 and isinstance(config["alpha"], float)
    assert config["norm"] == "l1" and config["hidden_size"] % config["n_heads"]
    with pytest.raises(UsageError, match="norm: expected text"):
        PosConfig("TinyGRU", "tiny", None, options(tiny, norm=3))
    with pytest.raises(UsageError, match="norm: 'l1' is not one of pre, post"):
        PosConfig("PosSASRec", "tiny", None, options(tiny, norm="l1"))


def test_defaults_are_checked_like_what_is_given(tiny: Path, mine) -> None:
    for wrong, message in (
        ({"augmentation": "windows"}, "defaults of TinyGRU: augmentation: 'windows'"),
        ({"gru_width": torch.ones(2)}, "defaults of TinyGRU: gru_width: expected text, numbers"),
    ):
        recbole_pos.register_model(mine.TinyGRU, {**GRU, **wrong})
        with pytest.raises(UsageError, match=message):
            PosConfig("TinyGRU", "tiny", None, options(tiny))


# --- what is refused ---


class _Nothing(nn.Module):
    pass


def test_models_that_are_none(mine) -> None:
    from recbole.model.abstract_recommender import ContextRecommender, SequentialRecommender

    class NoEncoder(recbole_pos.PosRecommender):
        pass

    class NoLoss(SequentialRecommender):
        def predict(self, interaction): ...

    class NoScores(SequentialRecommender):
        def calculate_loss(self, interaction): ...

    class Context(ContextRecommender):
        pass

    for model, message in (
        ("TinyGRU", "expected a class or a name, found 'TinyGRU'"),
        (_Nothing, "_Nothing is no recommender"),
        (Context, "neither a sequential nor a general"),
        (NoEncoder, "defines no encode and no states"),
        (NoLoss, "defines no calculate_loss"),
        (NoScores, "defines no full_sort_predict and no predict"),
    ):
        with pytest.raises(UsageError, match=message):
            recbole_pos.register_model(model)
    with pytest.raises(UsageError, match="defaults: expected a dict of options or the path"):
        recbole_pos.register_model(mine.TinyGRU, defaults=["gru_width"])
    with pytest.raises(UsageError, match="defaults: dataset says what is run"):
        recbole_pos.register_model(mine.TinyGRU, defaults={"dataset": "tiny"})
    assert not list(ADDED)


def test_names_of_others(mine) -> None:
    class Other(recbole_pos.PosRecommender):
        def encode(self, items, ctx): ...

    recbole_pos.register_model(mine.TinyGRU, defaults=GRU)
    for name, holder in (
        ("TinyGRU", r"__main__:TinyGRU; give \S*Other another"),
        ("FPARec", "recbole-pos"),
        ("SASRec", "RecBole"),
        ("LightGCN", "RecBole has a model of this name"),
        ("my-model", "begins with"),
    ):
        with pytest.raises(UsageError, match=f"{name}.*{holder}|{holder}.*{name}"):
            recbole_pos.register_model(Other, name=name)


def test_schemes_that_are_none(mine) -> None:
    attention = recbole_pos.AttentionPosition

    class Misspelt(attention):
        def biass(self, q, k, ctx): ...

    class Positional(mine.Recency):
        def __init__(self, dimensions, slope):
            super().__init__(dimensions, recency_slope=slope)

    class Text(mine.Recency):
        options = "recency_slope"

    slope = {"recency_slope": 1.0}
    for name, scheme, defaults, message in (
        ("a", _Nothing, None, "expected a class that extends recbole_pos.AttentionPosition"),
        ("a", Misspelt, None, "does nothing: it defines no rotate"),
        ("a", mine.Recency, None, "recency_slope has no default"),
        ("a", mine.Recency, {**slope, "b": 1}, "b has a default, but is not among"),
        ("a", Positional, slope, r"built as Positional\(dimensions, recency_slope=...\)"),
        ("a", Text, slope, "options: expected names"),
        ("rope", mine.Recency, slope, "taken by recbole-pos"),
        ("keys", mine.Recency, slope, "torch has this name for itself"),
        ("a b", mine.Recency, slope, "letters, digits"),
    ):
        with pytest.raises(UsageError, match=message):
            recbole_pos.register_scheme(name, scheme, defaults)
    assert "a" not in SCHEMES


def test_an_unknown_model_says_what_to_do(tiny: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown model 'TinyGRU'.*--plugins='\[my_models\]'"):
        PosConfig("TinyGRU", "tiny", None, options(tiny))
    with pytest.raises(UsageError, match=r"unknown scheme 'recency'.*register_scheme first"):
        PosConfig("PosSASRec", "tiny", None, options(tiny, position=["recency"]))


# --- from a module ---


def test_a_module_of_the_working_directory(here: Path, tiny: Path) -> None:
    """Found, recorded once, and its names may stand where names stand."""
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
    recommend = "assert main(['recommend', 'out', '-k', '2', '--users', 'u9']) == 0\n"
    resume = "assert main(['run', '--resume', 'out', '--epochs=2', '--quiet']) == 0\n"
    later = "sys.path.remove('')\n" + recommend + resume  # as an installed command has it
    call(here, "-c", main + later)
    assert (here / "out" / "recommendations.csv").read_text().count("u9") == 2
    assert len((here / "out" / "metrics.jsonl").read_text().splitlines()) == 2

    (here / "elsewhere").mkdir()
    said = call(
        here / "elsewhere",
        "-c",
        f"{main}main(['recommend', '../out'])\n{MODULE}{REGISTER}"
        "print(type(recbole_pos.load('../out').model))\n",
    )
    assert "plugins: there is no module 'my_models'" in said and "register" in said
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


# --- entry points ---


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


def test_options_of_one_in_a_module_are_listed(here: Path, capsys) -> None:
    assert main(["run", "-m", "TinyGRU", "--plugins=[my_models]", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "gru_width" in printed and "Standard deviation of" in printed


def _message(action) -> str:
    with pytest.raises(UsageError) as caught:
        action()
    return str(caught.value)


def test_another_class_of_a_name_of_recboles_is_not_taken_for_it(tiny: Path, mine) -> None:
    """BERT4Rec's loss and SASRec's windows are for RecBole's classes alone."""
    theirs = type("SASRec", (mine.Markov,), {})
    recbole_pos.register_model(theirs, name="OtherSASRec")
    made = prepare(PosConfig(theirs, "tiny", None, options(tiny)))
    assert type(adapter(made.config, made.model)) is Rows


# --- nothing heavy ---


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


def test_states_of_another_shape_are_named(tiny: Path) -> None:
    class Wide(PosSASRec):
        """States twice as wide as item vectors."""

        def encode(self, items, ctx):
            states = super().encode(items, ctx)
            return torch.cat((states, states), -1)

    options = {"data_path": str(tiny), "epochs": 1, "hidden_size": 16}
    with pytest.raises(UsageError, match=r"Wide: encode gives .* expected \[\d+, 16\]"):
        recbole_pos.run(Wide, "tiny", config_dict=options, verbose=False)


def test_a_forgotten_default_is_named(tiny: Path) -> None:
    class Forgetful(PosSASRec):
        """Reads what nobody gives."""

        def __init__(self, config, dataset):
            super().__init__(config, dataset)
            self.half = 1.0 - config["forgotten_share"]

    with pytest.raises(UsageError, match="it reads forgotten_share: no default"):
        recbole_pos.run(Forgetful, "tiny", config_dict={"data_path": str(tiny)}, verbose=False)
