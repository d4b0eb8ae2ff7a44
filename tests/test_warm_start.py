"""Attaching schemes to a trained model and fine-tuning only them (kernel paper, section 6.1)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from conftest import SMALL, make_log, train, write_atomic

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import prepare
from recbole_pos.experiment.run import load

MODEL = "PosSASRec"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load(folder).model.state_dict()


@pytest.fixture
def first(trained, tmp_path) -> Path:
    whole = trained(MODEL, n_heads=1, position=["learned", "rope"])
    return Path(shutil.copytree(whole, tmp_path / "first"))


def test_only_the_kernel_moves(first, tmp_path) -> None:
    options = {"weight_decay": 0.1, "learning_rate": 0.01}
    result = recbole_pos.attach(first, "kernel", options, tmp_path / "second", verbose=False)
    before, after = weights(first), weights(tmp_path / "second")
    added = {key: value for key, value in after.items() if ".kernel." in key}
    assert after.keys() - before.keys() == added.keys() and len(added) == 4  # U and L in two layers
    assert all(torch.equal(after[key], value) for key, value in before.items())
    length = load(first).config["MAX_ITEM_LIST_LENGTH"]
    rows = [value for key, value in added.items() if key.endswith("U.weight")]
    assert not any(torch.equal(row, torch.eye(length)[0]) for row in rows)
    assert result.parameters == 2 * length + length * (length + 1) // 2


def test_an_attached_kernel_starts_at_the_trained_model(tiny, tmp_path) -> None:
    first = train(tiny, tmp_path / "first", MODEL, n_heads=1, position=["cape"])
    options = {"position": ["cape", "kernel"], "init_from": str(first), "train_only": ["kernel"]}
    made = prepare(PosConfig(None, None, [str(first / "config.yaml")], options))
    rows = next(iter(made.loaders["test"]))[0]
    scores = [m.eval().full_sort_predict(rows) for m in (made.model, load(first).model)]
    assert torch.equal(*scores)


def test_a_run_starts_from_another_as_a_whole(tiny, first, tmp_path) -> None:
    options = {"n_heads": 1, "position": ["learned", "rope"], "init_from": str(first)}
    before, after = weights(first), weights(train(tiny, tmp_path / "second", MODEL, **options))
    key = "position_embedding.weight"
    assert not torch.equal(before[key], after[key])
    assert (before[key] - after[key]).abs().max() < 0.1  # moved on from there


def test_a_finished_fine_tuning_needs_its_source_no_more(first, tmp_path) -> None:
    recbole_pos.attach(first, ["kernel"], {"epochs": 1}, tmp_path / "second", verbose=False)
    first.rename(tmp_path / "gone")
    load(tmp_path / "second")
    resumed = recbole_pos.run(resume=tmp_path / "second", config_dict={"epochs": 2}, verbose=False)
    assert resumed.epochs == 2


def test_what_does_not_fit_is_not_attached(first, tmp_path) -> None:
    shuffled = write_atomic(make_log().iloc[::-1], tmp_path / "shuffled")  # other ids, same sizes
    cases = [
        ({"schemes": "rope"}, "given twice"),
        ({"schemes": "fparec"}, "replaces attention"),
        ({"schemes": "alibi"}, "has no parameters of"),
        ({"config_dict": {"hidden_size": 8}}, "was trained with hidden_size: 16"),
        ({"config_dict": {"block": "hstu"}}, "was trained with block: transformer"),
        ({"config_dict": {"train_only": ["rope"]}}, "attach and update decide it"),
        ({"config_dict": {"data_path": str(shuffled)}}, "other data or another split"),
    ]
    for change, message in cases:
        given = {"trained": first, "schemes": "kernel", "run_dir": tmp_path / "x", **change}
        with pytest.raises(UsageError, match=message):
            recbole_pos.attach(**given, verbose=False)
        assert not (tmp_path / "x").exists(), message


def test_weights_are_not_loaded_into_another_function(tiny, first) -> None:
    """Shapes alone would let these pass."""
    given = {**SMALL, "data_path": str(tiny), "init_from": str(first), "n_heads": 1}
    both = ["learned", "rope"]
    for model, change, message in [
        ("PosSASRec", {"position": ["learned", "kernel"]}, "has the scheme rope"),
        ("PosSASRec", {"position": both, "position_from": "oldest"}, "position_from"),
        # another default of the same option
        ("KernelAttention", {"position": [*both, "kernel"]}, "embedding_scale"),
    ]:
        with pytest.raises(UsageError, match=message):
            prepare(PosConfig(model, "tiny", None, {**given, **change}))


def test_another_choice_of_targets_is_no_other_data(tiny, tmp_path) -> None:
    gt = {"eval_args": {"split": {"GT": [0.7, 0.85]}}}
    first = train(tiny, tmp_path / "first", MODEL, n_heads=1, position=["rope"], **gt)
    options = {"epochs": 1, "eval_args": {"target": "last"}}
    result = recbole_pos.attach(first, "kernel", options, tmp_path / "x", verbose=False)
    assert result.split["target"] == "last" and "GT" in result.split["split"]
