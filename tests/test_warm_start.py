"""Attaching schemes to a trained model and fine-tuning only them (kernel paper, section 6.1)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import SMALL, make_log, write_atomic

import recbole_pos
from recbole_pos.cli import main
from recbole_pos.config import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.quick_start import load, prepare

SCHEMES = [["cape"], ["rope"], ["learned", "rope"]]


def train(tiny: Path, folder: Path, **options) -> Path:
    given = {**SMALL, "data_path": str(tiny), "n_heads": 1, **options}
    recbole_pos.run("PosSASRec", "tiny", None, given, run_dir=folder, verbose=False)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load(folder).model.state_dict()


@pytest.mark.parametrize("position", SCHEMES, ids=str)
def test_only_the_kernel_moves(tiny: Path, tmp_path: Path, position: list[str]) -> None:
    first = train(tiny, tmp_path / "first", position=position)
    options = {"weight_decay": 0.1, "learning_rate": 0.01}
    result = recbole_pos.attach(first, "kernel", options, tmp_path / "second", verbose=False)
    before, after = weights(first), weights(tmp_path / "second")
    added = {key for key in after if ".kernel." in key}
    assert set(after) - set(before) == added and len(added) == 4  # U and L in two layers
    for key, value in before.items():
        assert torch.equal(after[key], value), key
    fresh = load(first).config["MAX_ITEM_LIST_LENGTH"]
    for key in added:
        if key.endswith("U.weight"):
            assert not torch.equal(after[key], torch.eye(fresh)[0])
    assert result.parameters == 2 * fresh + fresh * (fresh + 1) // 2


def test_an_attached_kernel_starts_at_the_trained_model(tiny: Path, tmp_path: Path) -> None:
    first = train(tiny, tmp_path / "first", position=["cape"])
    options = {"position": ["cape", "kernel"], "init_from": str(first), "train_only": ["kernel"]}
    made = prepare(PosConfig(None, None, [str(first / "config.yaml")], options))
    rows = next(iter(made.loaders["test"]))[0]
    scores = [m.eval().full_sort_predict(rows) for m in (made.model, load(first).model)]
    assert torch.equal(*scores)
    trained = [name for name, p in made.model.named_parameters() if p.requires_grad]
    assert trained and all(".kernel." in name for name in trained)


def test_a_run_starts_from_another_as_a_whole(tiny: Path, tmp_path: Path) -> None:
    first = train(tiny, tmp_path / "first", position=["learned"])
    second = train(tiny, tmp_path / "second", position=["learned"], init_from=str(first), epochs=1)
    before, after = weights(first), weights(second)
    key = "position_embedding.weight"
    assert not torch.equal(before[key], after[key])
    assert (before[key] - after[key]).abs().max() < 0.1  # moved on from there


def test_a_finished_fine_tuning_needs_its_source_no_more(tiny: Path, tmp_path: Path) -> None:
    first = train(tiny, tmp_path / "first", position=["rope"])
    recbole_pos.attach(first, ["kernel"], {"epochs": 1}, tmp_path / "second", verbose=False)
    first.rename(tmp_path / "gone")
    load(tmp_path / "second")
    resumed = recbole_pos.run(resume=tmp_path / "second", config_dict={"epochs": 2}, verbose=False)
    assert resumed.epochs == 2
    assert resumed.parameters == 2 * 12 + 12 * 13 // 2  # still nothing else


def test_the_command_attaches(tiny: Path, tmp_path: Path, capsys) -> None:
    first = train(tiny, tmp_path / "first", position=["rope"])
    arguments = ["attach", str(first), "kernel", "--run_dir", str(tmp_path / "second")]
    assert main([*arguments, "--epochs=1", "--kernel_band=4"]) == 0
    assert weights(tmp_path / "second")[
        "trm_encoder.layer.0.multi_head_attention.position.schemes.kernel.U.weight"
    ].shape == (4,)
    assert main([*arguments, "--epochs=1"]) == 2  # the folder holds a run
    assert "holds a run already" in capsys.readouterr().err


def test_what_cannot_be_attached(tiny: Path, tmp_path: Path) -> None:
    first = train(tiny, tmp_path / "first", position=["rope"], epochs=1)
    other = write_atomic(make_log(seed=1), tmp_path / "data", "other")
    cases = [
        ({"schemes": "rope"}, "given twice"),
        ({"schemes": "kernal"}, "kernal"),
        ({"schemes": "fparec"}, "replaces attention"),
        ({"schemes": "nope"}, "no parameters of a scheme 'nope'"),
        ({"config_dict": {"hidden_size": 8}}, "do not fit"),
        ({"config_dict": {"n_layers": 3}}, "another architecture"),
        ({"config_dict": {"dataset": "other", "data_path": str(other)}}, "same data"),
        ({"config_dict": {"eval_args": {"split": {"GT": [0.8, 0.9]}}}}, "same data"),
        ({"trained": tmp_path / "nowhere"}, "cannot read config file"),
    ]
    for change, message in cases:
        given = {"trained": first, "schemes": "kernel", "run_dir": tmp_path / "x", **change}
        with pytest.raises(UsageError, match=message):
            recbole_pos.attach(**given, verbose=False)
        assert not (tmp_path / "x").exists(), message


def test_builtin_models_do_not_start_from_runs(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only the plugin's models"):
        PosConfig("SASRec", "tiny", None, {"data_path": str(tiny), "init_from": "saved/x"})
