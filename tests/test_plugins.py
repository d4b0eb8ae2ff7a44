"""Models and schemes of one's own in this process: registered, run, refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from own_models import GRU, MODULE, config_of, options
from recbole.model.general_recommender import BPR, LightGCN
from recbole.model.sequential_recommender import SASRec
from torch import nn

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import prepare
from recbole_pos.model.fparec import FPARec
from recbole_pos.model.models import ADDED, name_of
from recbole_pos.model.sasrec import PosSASRec
from recbole_pos.model.training import RecBoleAdapter, adapter
from recbole_pos.position.schemes import SCHEMES

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
        assert PosConfig(model, "tiny", None, {"data_path": str(tiny)})["model"] == model.__name__
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


def test_another_class_of_a_name_of_recboles_is_not_taken_for_it(tiny: Path, mine) -> None:
    """BERT4Rec's loss and SASRec's windows are for RecBole's classes alone."""
    theirs = type("SASRec", (mine.Markov,), {})
    recbole_pos.register_model(theirs, name="OtherSASRec")
    made = prepare(PosConfig(theirs, "tiny", None, options(tiny)))
    assert type(adapter(made.config, made.model)) is RecBoleAdapter


def test_states_of_another_shape_are_named(tiny: Path) -> None:
    class Wide(PosSASRec):
        """States twice as wide as item vectors."""

        def encode(self, items, ctx):
            states = super().encode(items, ctx)
            return torch.cat((states, states), -1)

    options = {"data_path": str(tiny), "epochs": 1, "hidden_size": 16}
    with pytest.raises(UsageError, match=r"Wide: encode gives .* expected \[\d+, 16\]"):
        recbole_pos.run(Wide, "tiny", config_dict=options, verbose=False)


def test_a_forgotten_default_is_named(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Forgetful(PosSASRec):
        """Reads what nobody gives."""

        def __init__(self, config, dataset):
            super().__init__(config, dataset)
            self.half = 1.0 - config["forgotten_share"]

    with pytest.raises(TypeError):  # as Python raised it in that class
        recbole_pos.run(Forgetful, "tiny", config_dict={"data_path": str(tiny)}, verbose=False)
    assert "forgotten_share" in caplog.text
