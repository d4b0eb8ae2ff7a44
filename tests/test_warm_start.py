"""Attaching schemes to a trained model and fine-tuning only them (kernel paper, section 6.1)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import SMALL, make_log, write_atomic

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import CheckpointError, UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.build import prepare
from recbole_pos.experiment.run import load


def train(tiny: Path, folder: Path, **options) -> Path:
    given = {**SMALL, "data_path": str(tiny), "n_heads": 1, **options}
    recbole_pos.run("PosSASRec", "tiny", None, given, run_dir=folder, verbose=False)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load(folder).model.state_dict()


def test_only_the_kernel_moves(tiny: Path, tmp_path: Path) -> None:
    first = train(tiny, tmp_path / "first", position=["learned", "rope"])
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
    options = ["--clip_grad_norm={max_norm: 1.0, norm_type: 2}", "--epochs=1", "--kernel_band=4"]
    assert main([*arguments[:3], *options, *arguments[3:]]) == 0
    assert weights(tmp_path / "second")[
        "trm_encoder.layer.0.multi_head_attention.position.schemes.kernel.U.weight"
    ].shape == (4,)
    assert main([*arguments, "--epochs=1"]) == 2  # the folder holds a run
    assert "holds a run already" in capsys.readouterr().err


def test_what_cannot_be_attached(tiny: Path, tmp_path: Path) -> None:
    first = train(tiny, tmp_path / "first", position=["rope"], epochs=1)
    other = write_atomic(make_log(seed=1), tmp_path / "data", "other")
    shuffled = write_atomic(make_log().iloc[::-1], tmp_path / "shuffled")  # other ids, same sizes
    cases = [
        ({"schemes": "rope"}, "given twice"),
        ({"schemes": "kernal"}, "kernal"),
        ({"schemes": "fparec"}, "replaces attention"),
        ({"schemes": "nope"}, "nope stands alone"),
        ({"schemes": "alibi"}, "no parameters to train"),
        ({"config_dict": {"hidden_size": 8}}, "was trained with hidden_size: 16"),
        ({"config_dict": {"n_heads": 2}}, "was trained with n_heads: 1"),
        ({"config_dict": {"norm": "post"}}, "was trained with norm: pre"),
        ({"config_dict": {"rope_base": 100.0}}, "was trained with rope_base"),
        ({"config_dict": {"n_layers": 3}}, "was trained with n_layers"),
        ({"config_dict": {"train_only": ["rope"]}}, "attach decides"),
        ({"config_dict": {"dataset": "other", "data_path": str(other)}}, "with dataset: tiny"),
        ({"config_dict": {"data_path": str(shuffled)}}, "other data or another split"),
        ({"config_dict": {"eval_args": {"split": {"GT": [0.8, 0.9]}}}}, "another split"),
        ({"trained": tmp_path / "nowhere"}, "nowhere is not a run folder"),
    ]
    for change, message in cases:
        given = {"trained": first, "schemes": "kernel", "run_dir": tmp_path / "x", **change}
        with pytest.raises(UsageError, match=message):
            recbole_pos.attach(**given, verbose=False)
        assert not (tmp_path / "x").exists(), message


def test_weights_are_not_loaded_into_another_function(tiny: Path, tmp_path: Path) -> None:
    """Shapes alone would let these pass."""
    first = train(tiny, tmp_path / "first", position=["learned", "rope"], epochs=1)
    given = {**SMALL, "data_path": str(tiny), "init_from": str(first), "n_heads": 1}
    for change, message in [
        ({"position": ["learned", "kernel"]}, "has the scheme rope"),
        ({"position": ["learned", "rope"], "position_from": "oldest"}, "position_from"),
        ({"position": ["learned", "rope"], "hidden_act": "tanh"}, "hidden_act"),
    ]:
        with pytest.raises(UsageError, match=message):
            prepare(PosConfig("PosSASRec", "tiny", None, {**given, **change}))
    with pytest.raises(UsageError, match="embedding_scale"):  # another default of the same option
        given["position"] = ["learned", "rope", "kernel"]
        prepare(PosConfig("KernelAttention", "tiny", None, given))


def test_several_inputs_on_top_of_one(tiny: Path, tmp_path: Path) -> None:
    """One input encoding stands bare in a model, two under their names."""
    first = train(tiny, tmp_path / "first", position=["learned"], epochs=1)
    options = {"epochs": 1}
    recbole_pos.attach(first, ["sinusoidal", "kernel"], options, tmp_path / "x", verbose=False)
    before, after = weights(first), weights(tmp_path / "x")
    assert torch.equal(
        before["position_embedding.weight"], after["position_embedding.schemes.learned.weight"]
    )


def test_an_untrained_run_is_no_start(tiny: Path, tmp_path: Path) -> None:
    first = train(tiny, tmp_path / "first", position=["rope"], epochs=1)
    state = checkpoint.load(first / "checkpoint.pt")
    checkpoint.save(first / "checkpoint.pt", {**state, "best_weights": None})
    with pytest.raises(UsageError, match="no trained epoch"):
        recbole_pos.attach(first, "kernel", run_dir=tmp_path / "x", verbose=False)


def test_changed_data_are_noticed(tiny: Path, tmp_path: Path) -> None:
    """A run is neither loaded nor resumed on other events, nor on the same at other times."""
    folder, log = write_atomic(make_log(), tmp_path / "data"), make_log()
    first = train(folder, tmp_path / "first", position=["time_rope"], epochs=1)
    for changed in (log.iloc[::-1], log.assign(timestamp=2 * log.timestamp)):
        write_atomic(changed, tmp_path / "data")
        with pytest.raises(CheckpointError, match="other data"):
            load(first)
        with pytest.raises(CheckpointError, match="other data"):
            recbole_pos.run(resume=first, config_dict={"epochs": 2}, verbose=False)
    state = checkpoint.load(first / "checkpoint.pt")  # older runs knew no times
    checkpoint.save(first / "checkpoint.pt", {**state, "data": state["data"][:32]})
    load(first)
    checkpoint.save(first / "checkpoint.pt", {**state, "data": state["data"][32:]})
    with pytest.raises(CheckpointError, match="other data"):
        load(first)


def test_another_choice_of_targets_is_no_other_data(tiny: Path, tmp_path: Path) -> None:
    gt = {"eval_args": {"split": {"GT": [0.7, 0.85]}}}
    first = train(tiny, tmp_path / "first", position=["rope"], epochs=1, **gt)
    options = {"epochs": 1, "eval_args": {"target": "last"}}
    result = recbole_pos.attach(first, "kernel", options, tmp_path / "x", verbose=False)
    assert result.split["target"] == "last" and "GT" in result.split["split"]


def test_recboles_own_entry_does_not_ignore_the_options(tiny: Path) -> None:
    from recbole.quick_start import run_recbole

    options = {**SMALL, "data_path": str(tiny), "init_from": "saved/x"}
    with pytest.raises(UsageError, match="recbole_pos.run"):
        run_recbole(model="PosSASRec", dataset="tiny", config_dict=options, saved=False)


def test_builtin_models_do_not_start_from_runs(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only the plugin's models"):
        PosConfig("SASRec", "tiny", None, {"data_path": str(tiny), "init_from": "saved/x"})


def test_runs_older_than_an_option_have_its_default(tiny: Path, tmp_path: Path) -> None:
    first = train(tiny, tmp_path / "first", position=["rope"])
    file = first / "config.yaml"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(x for x in lines if not x.startswith(("block:", "timestamp_unit:"))))
    recbole_pos.attach(first, "kernel", None, tmp_path / "second", verbose=False)
    with pytest.raises(UsageError, match="trained with block: transformer"):
        recbole_pos.attach(first, "kernel", {"block": "hstu"}, tmp_path / "third", verbose=False)
