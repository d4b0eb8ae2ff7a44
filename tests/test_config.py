"""Configuration: where options come from, which source wins, and that every one is read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from recbole_pos.config.options import find_unmet, flatten_options
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.config.sources import FOR, select_parts
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import prepare
from recbole_pos.experiment.callbacks import make_loggers
from recbole_pos.model.models import MODELS, is_on_our_base, list_kinds
from recbole_pos.position.schemes import SCHEMES
from recbole_pos.yaml_files import ROOT, parse_scalar, read_overall_defaults, read_yaml


@pytest.fixture
def opened(tmp_path: Path, monkeypatch) -> Any:
    """``opened(model, text, ..., **options)``: the configuration from files of these texts."""
    monkeypatch.chdir(tmp_path)

    def build(model: str | None, *texts: str, **options: Any) -> PosConfig:
        files = [f"{name}.yaml" for name in "abc"[: len(texts)]]
        for file, text in zip(files, texts, strict=True):
            Path(file).write_text(text)
        return PosConfig(model, "ml-100k", files, options)

    return build


@pytest.mark.parametrize(
    ("text", "options", "named"),
    [
        ("epochs: 1\nhidden_size: x\n", {}, "a.yaml: hidden_size"),
        ("epochs: 1\nhidden_size: x\n", {"epochs": "abc", "hidden_size": 8}, "configuration: epo"),
        ("epochs: !!python/object/apply:os.getpid []\n", {}, "a.yaml, line 1: "),
        # parts for a model or scheme: whichever model runs, a misspelt name is found
        ("for: {FPARek: {epochs: 1}}", {}, "a.yaml, for FPARek: 'FPARek' is neither"),
        ("for: {SASRec: {model: PARec}}", {}, "for SASRec: model cannot"),
        ("for: {PosSASRec: {positional_rank: 4}}", {}, "a.yaml, for PosSASRec: unknown key"),
        ("negatives: 3", {}, "it is read with loss_type: BCE, gBCE, sampled_softmax"),
    ],
    ids=lambda x: x.strip() if isinstance(x, str) else "",
)
def test_the_file_that_is_wrong_is_the_one_blamed(opened, text: str, options, named: str) -> None:
    with pytest.raises(UsageError) as refused:
        opened("PosSASRec", text, **options)
    assert named in str(refused.value)


def test_values_are_never_evaluated(opened, tmp_path: Path) -> None:
    """RecBole's Config runs eval on strings from the command line and from dicts."""
    code = f"__import__('pathlib').Path({str(tmp_path / 'ran')!r}).touch()"
    assert opened("FPARec", LIST_SUFFIX=code)["LIST_SUFFIX"] == code
    assert not (tmp_path / "ran").exists()


FEW = {"short_below": 8, "train_fraction": "1/40", "eval_args": {"split": {"ST": [40, 50]}}}


@pytest.mark.parametrize(
    ("options", "dropout"), [({}, 0.5), ({"embedding_scale": True}, 0.2), (FEW, 0.2)]
)
def test_defaults_of_short_histories(experiment, options: dict, dropout: float) -> None:
    """They change together, and not again where the run's config.yaml is run on other data.

    Of FEW's 60 users 39 have no interactions left, and do not count.
    """
    config = experiment("PosSASRec", **options).config  # 12.25 interactions a user
    (again := PosConfig(config_dict=config.plain)).adapt({"users": 2, "items": 9, "events": 9})
    for made in (config, again):
        assert made["hidden_dropout_prob"] == made.plain["hidden_dropout_prob"] == dropout
    assert config["embedding_scale"] == again["embedding_scale"] == (options != FEW)


def test_plain_configuration_repeats_itself(opened) -> None:
    first = opened("FPARec", learning_rate=np.float64(0.5), position=["parec"])
    again = opened(None, yaml.safe_dump(first.plain))
    assert again.plain == first.plain and again.plain["learning_rate"] == 0.5
    assert again.final_config_dict == first.final_config_dict


def test_a_copy_in_data_path_wins_over_the_wheel(opened, tmp_path: Path) -> None:
    assert opened("FPARec")["data_path"].endswith("dataset_example/ml-100k")
    (tmp_path / "ml-100k").mkdir()
    (tmp_path / "ml-100k" / "ml-100k.inter").write_text("")
    assert opened("FPARec", data_path=str(tmp_path))["data_path"] == str(tmp_path / "ml-100k")


class Recording(PosConfig):
    read: set[str]

    def __getitem__(self, key: str):
        self.__dict__.setdefault("read", set()).add(key)
        return super().__getitem__(key)

    def __getattr__(self, key: str):
        if "final_config_dict" in self.__dict__ and key in self.final_config_dict:
            self.__dict__.setdefault("read", set()).add(key)
        return super().__getattr__(key)


@pytest.mark.parametrize("model", list(MODELS))
def test_every_key_of_the_plugins_yaml_is_read(tiny: Path, model: str) -> None:
    """The options of model, schemes and table whose conditions are met, against a training run."""
    given = {"data_path": str(tiny), "epochs": 1, "show_progress": False}
    config = Recording(model, "tiny", None, given)
    config.__dict__["read"] = set()
    made = prepare(config)
    made.trainer.fit(made.loaders["train"], made.loaders["valid"], saved=False, verbose=False)
    make_loggers(config)
    keys = set(MODELS.defaults(model))
    if is_on_our_base(model):
        keys |= set(read_overall_defaults())
    for name in config["position"] or ():
        keys |= set(SCHEMES.defaults(name))
    keys -= {"metrics", "column_types"}  # RecBole's Config reads them; of parquet
    kinds = list_kinds(model, config["MODEL_TYPE"])
    options = flatten_options(config.plain)
    is_declared = [key for key in keys if find_unmet(key, options, kinds) is None]
    assert set(is_declared) - config.read == set()


def test_sources_are_merged(tmp_path: Path, opened) -> None:
    """The dataset's yaml below files below what is given; ``eval_args`` key by key."""
    (tmp_path / "ml-100k").mkdir()
    file = tmp_path / "ml-100k" / "ml-100k.yaml"
    file.write_text(
        "eval_args: {split: {RS: [8, 1, 1]}}\nposition: [parec]\nepochs: 3\n"
        "item_vectors_whiten: True\n"  # for other models; nothing reads it here
        "for: {PARec: {n_layers: 3}}\n"
    )
    data = {"data_path": str(tmp_path)}
    config = opened("PosSASRec", **data, epochs=5)
    assert config["eval_args"]["split"] == {"RS": [8, 1, 1]}
    assert config["eval_args"]["order"] == "TO"
    assert config["positional_mask"] == "before_softmax" and config["epochs"] == 5
    texts = "eval_args: {split: {GT: [0.9, 0.95]}}", "eval_args: {cold_items: drop}"
    config = opened("PARec", *texts, **data, eval_args={"target": "last"})
    values = {key: config["eval_args"][key] for key in ("split", "cold_items", "target")}
    assert values == {"split": {"GT": [0.9, 0.95]}, "cold_items": "drop", "target": "last"}
    assert config["n_layers"] == 3 and config["epochs"] == 3
    file.write_text("lod_col: {inter: [a]}\n")
    with pytest.raises(UsageError, match="ml-100k.yaml: unknown key 'lod_col'"):
        opened("FPARec", **data)


# --- presets, and files for several models ---

PRESETS = sorted(str(p.relative_to(ROOT / "presets")) for p in (ROOT / "presets").rglob("*.yaml"))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_what_its_model_runs_with(preset: str) -> None:
    """That of the rows it is compared with says test_pages."""
    content = read_yaml(ROOT / "presets" / preset)
    config = PosConfig(None, "ml-100k", [preset])
    _, *parts = select_parts(content, {content["model"]}, preset)
    own = {key: value for _, options in parts for key, value in options.items()}
    wanted = {k: v for k, v in {**content, **own}.items() if k not in (FOR, "eval_args")}
    assert {key: config.plain[key] for key in wanted} == wanted


def test_options_are_for_the_model_that_runs(opened) -> None:
    text = """
model: FPARec
hidden_size: 32
for:
  FPARec, PARec: {hidden_size: 16, eval_args: {cold_items: drop}}
  FPARec:
  SASRec: {n_heads: 4}
eval_args: {split: {LS: valid_only}}
"""
    for model, size in ((None, 16), ("PARec", 16), ("SASRec", 32)):
        config = opened(model, text)
        assert config["hidden_size"] == size and FOR not in config.plain
        assert config["eval_args"]["split"] == {"LS": "valid_only"}  # merged key by key
        assert (config["eval_args"]["cold_items"] == "drop") == (size == 16)
    assert opened("SASRec", text)["n_heads"] == 4
    assert opened("SASRec", text, n_heads=1)["n_heads"] == 1
    assert opened("PARec", text, "hidden_size: 8\n")["hidden_size"] == 8  # later files win


def test_options_are_for_schemes_that_position_names(opened) -> None:
    """Wherever it is named: in a file, for the model, by its own yaml, on the command line."""
    text = "for: {rope: {rope_base: 7.0}, 'alibi, kerple': {kerple_kind: power}}\n"
    assert opened("PosSASRec", text, position="kerple")["kerple_kind"] == "power"
    assert opened("PosSASRec", text, "position: [rope, kernel]\n")["rope_base"] == 7
    assert opened("PosSASRec", text, "for: {PosSASRec: {position: [rope]}}\n")["rope_base"] == 7
    assert opened("FPARec", "for: {fparec: {positional_rank: 3}}\n")["positional_rank"] == 3
    assert "rope_base" not in opened("PosSASRec", text).plain


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("epochs: 1\n\tseed: 2\n", "line 2: found character '\\t'"),
        ("epochs: 1\nseed:2\n\n# end\n", "line 2: could not find expected ':'"),
        ("a: 1\nb: {c: 1, c: 2}\n", "line 2: key 'c' is given twice"),
        ("seed:2\n", "with a space after the colon; found 'seed:2'"),
    ],
)
def test_slips_in_yaml_are_named_with_their_line(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UsageError, match="a.yaml") as refused:
        read_yaml(tmp_path / "a.yaml")
    assert named in str(refused.value)


def test_yaml_is_read_within_bounds_or_refused_in_one_line(tmp_path) -> None:
    file = tmp_path / "a.yaml"
    doubled = (f"b{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 20))
    aliases = "a: &a0 [1]\n" + "".join(doubled)
    deep, itself = b"[" * 100_000, b"a: &a [1, *a]"
    for text in (b"\xff\xfe\x00", b"a: 1\na: 2", aliases.encode(), deep, itself):
        file.write_bytes(text)
        with pytest.raises(UsageError) as refusal:
            read_yaml(file)
        assert str(file) in (message := str(refusal.value))
        assert len(message) < 600 and "\n" not in message
    assert parse_scalar("[&a [1, 2], *a]") == [[1, 2], [1, 2]], "aliases as such are fine"
    file.write_text("a: &a {x: 1}\nb: {c: &c {<<: *a, x: 2}}\nd: {<<: *c}\n")
    assert read_yaml(file) == {"a": {"x": 1}, "b": {"c": {"x": 2}}, "d": {"x": 2}}


def test_a_separator_on_the_command_line_is_text() -> None:
    assert [parse_scalar(sign) for sign in " |>-?#!~"] == [*" |>-?#!", None]
