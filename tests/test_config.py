"""Configuration: where options come from, which source wins, and that every one is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import recbole
import yaml

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import RunWarning, UsageError
from recbole_pos.experiment.build import prepare
from recbole_pos.experiment.loggers import make_loggers
from recbole_pos.model.models import BASELINES, MODELS
from recbole_pos.position.schemes import SCHEMES
from recbole_pos.yaml_files import (
    DATASETS,
    ROOT,
    PackagedLoader,
    YamlLoader,
    overall_defaults,
    read_yaml,
)


def make(model: str = "FPARec", files: list[str] | None = None, **options) -> PosConfig:
    return PosConfig(model, "ml-100k", files, options)


def test_the_file_that_is_wrong_is_the_one_blamed(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    for text, options, named in (
        ("epochs: 1\nhidden_size: x\n", {}, "a.yaml: hidden_size"),
        ("epochs: 1\nhidden_size: x\n", {"epochs": "abc", "hidden_size": 8}, "configuration: epo"),
        ("hiden_size: 8\n", {}, "hidden_size"),
        ("epochs: !!python/object/apply:os.getpid []\n", {}, "a.yaml is not valid yaml"),
        ("- a\n", {}, "a.yaml"),
    ):
        file.write_text(text)
        with pytest.raises(UsageError) as refused:
            make(files=[str(file)], **options)
        assert named in str(refused.value)
    with pytest.raises(UsageError, match="none.yaml"):
        make(files=[str(tmp_path / "none.yaml")])


def test_values_are_never_evaluated(tmp_path: Path) -> None:
    """RecBole's Config runs eval on strings from the command line and from dicts."""
    marker = tmp_path / "ran"
    code = f"__import__('pathlib').Path({str(marker)!r}).touch()"
    assert make(LIST_SUFFIX=code)["LIST_SUFFIX"] == code and not marker.exists()


@pytest.mark.slow
def test_both_loaders_read_the_same() -> None:
    """All files that the package and RecBole bring, by their loader and by that of others."""
    recboles = Path(recbole.__file__).parent / "properties"
    files = [file for folder in (ROOT, DATASETS, recboles) for file in folder.rglob("*.yaml")]
    assert len(files) > 150
    for text in (file.read_text("utf-8") for file in files):
        assert repr(yaml.load(text, PackagedLoader)) == repr(yaml.load(text, YamlLoader))


def test_cross_entropy_needs_no_option() -> None:
    """RecBole refuses SASRec with its own defaults; the plugin leaves the negatives out."""
    assert make("SASRec")["train_neg_sample_args"]["distribution"] == "none"
    assert make("BPR")["train_neg_sample_args"]["distribution"] == "uniform"


def test_plain_configuration_repeats_itself(tmp_path: Path) -> None:
    first = make(learning_rate=np.float64(0.5), position=["parec"])
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(first.plain))
    again = PosConfig(None, None, [str(file)])
    assert again.plain == first.plain and again.plain["learning_rate"] == 0.5
    assert again.final_config_dict == first.final_config_dict


def test_a_copy_in_data_path_wins_over_the_wheel(tmp_path: Path) -> None:
    assert make()["data_path"].endswith("dataset_example/ml-100k")
    (tmp_path / "ml-100k").mkdir()
    (tmp_path / "ml-100k" / "ml-100k.inter").write_text("")
    assert make(data_path=str(tmp_path))["data_path"] == str(tmp_path / "ml-100k")


class _Recording(PosConfig):
    """Notes every key that is read."""

    read: set[str]

    def __getitem__(self, key: str):
        self.__dict__.setdefault("read", set()).add(key)
        return super().__getitem__(key)

    def __getattr__(self, key: str):
        if "final_config_dict" in self.__dict__ and key in self.final_config_dict:
            self.__dict__.setdefault("read", set()).add(key)
        return super().__getattr__(key)


@pytest.mark.parametrize("model", [*MODELS, *BASELINES])
def test_every_key_of_the_plugins_yaml_is_read(tiny: Path, model: str) -> None:
    """No option that nothing reads: model, scheme and overall yaml against a training run."""
    config = _Recording(
        model, "tiny", None, {"data_path": str(tiny), "epochs": 1, "show_progress": False}
    )
    config.__dict__["read"] = set()
    experiment = prepare(config)
    experiment.trainer.fit(
        experiment.loaders["train"], experiment.loaders["valid"], saved=False, verbose=False
    )
    make_loggers(config)
    keys = set(read_yaml(ROOT / "model" / f"{model}.yaml"))
    if model in MODELS:
        keys |= set(overall_defaults())
    for name in config["position"] or ():
        keys |= set(read_yaml(ROOT / "position" / f"{name}.yaml"))
    elsewhere = {"metrics", "tensorboard"}  # RecBole's Config reads them
    elsewhere |= {"new_items", "column_types"}  # with update_from; of parquet
    elsewhere |= {f"item_vectors_{name}" for name in ("whiten", "train", "weight")}  # with vectors
    elsewhere |= {"numeric_bins"}  # with features that are numbers
    assert keys - config.read - elsewhere == set()


def test_every_scheme_and_model_has_its_yaml_and_no_other() -> None:
    assert {p.stem for p in (ROOT / "position").iterdir()} == set(SCHEMES)
    assert {p.stem for p in (ROOT / "model").iterdir()} == {*MODELS, *BASELINES}


def test_sources_are_merged(tmp_path: Path) -> None:
    """The dataset's yaml below files below what is given; ``eval_args`` key by key."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "tiny.yaml").write_text(
        "eval_args: {split: {RS: [8, 1, 1]}}\nposition: [parec]\nepochs: 3\n"
        "for: {PARec: {n_layers: 3}}\n"
    )
    files = []
    for name, text in (("a", "{split: {GT: [0.9, 0.95]}}"), ("b", "{cold_items: drop}")):
        (tmp_path / f"{name}.yaml").write_text(f"eval_args: {text}\n")
        files.append(str(tmp_path / f"{name}.yaml"))
    data = {"data_path": str(tmp_path)}
    config = PosConfig("PosSASRec", "tiny", None, {**data, "epochs": 5})
    assert config["eval_args"]["split"] == {"RS": [8, 1, 1]}
    assert config["eval_args"]["order"] == "TO"
    assert config["positional_mask"] == "before_softmax" and config["epochs"] == 5
    config = PosConfig("PARec", "tiny", files, {**data, "eval_args": {"target": "last"}})
    values = {key: config["eval_args"][key] for key in ("split", "cold_items", "target")}
    assert values == {"split": {"GT": [0.9, 0.95]}, "cold_items": "drop", "target": "last"}
    assert config["n_layers"] == 3 and config["epochs"] == 3
    (tmp_path / "tiny" / "tiny.yaml").write_text("lod_col: {inter: [a]}\n")
    with pytest.raises(UsageError, match="tiny.yaml: unknown key 'lod_col'"):
        PosConfig("FPARec", "tiny", None, data)


def test_an_option_of_an_earlier_version_is_left_out_with_a_warning() -> None:
    with pytest.warns(RunWarning, match="batch_shapes has no effect any more"):
        config = make(batch_shapes="auto")
    assert "batch_shapes" not in config.plain
