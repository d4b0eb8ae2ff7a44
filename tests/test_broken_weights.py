"""Checkpoints whose weights are no numbers, or too large to compute with: every command says so."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from shop import shop_options, tables, train, write

import recbole_pos
from recbole_pos.cli.main import main

ATTENTION = ["inspect", "attention", "--min_events", "5", "--checkpoint"]
RELATIONS = ["inspect", "relations", "--batches", "1", "--checkpoint"]
ENCODING = ["inspect", "encoding", "--length", "5", "--checkpoint"]
# the command before its run folder, and the model that it is for
COMMANDS = {
    "plot": (["plot"], "PosSASRec"),
    "plot of positions": (["plot"], "FPARec"),
    "inspect attention": (ATTENTION, "PosSASRec"),
    "inspect attention of positions": (ATTENTION, "FPARec"),
    "inspect attention of AttrFormer": (ATTENTION, "AttrFormer"),
    "inspect relations": (RELATIONS, "AttrFormer"),
    "inspect encoding": (ENCODING, "PosSASRec"),
}
BECAUSE = (["inspect", "because", "--user", "u1", "--checkpoint"], "PosSASRec")
PICTURES = ("*.png", "attention.json", "relations.json")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small run of each model."""
    folder = tmp_path_factory.mktemp("runs")
    shop = write(folder, tables())
    train(shop, folder / "AttrFormer", epochs=1)
    options = shop_options(shop)
    for key in ("relations", "relation_heads", "relation_size", "top_k"):
        del options[key]
    for model, position in (("PosSASRec", ["ldpe", "to_rope", "kernel"]), ("FPARec", ["fparec"])):
        given = {**options, "epochs": 1, "position": position}
        run_dir = folder / model
        recbole_pos.run(model, "shop", None, given, run_dir=run_dir, verbose=False)
    return {model: folder / model for model in ("AttrFormer", "PosSASRec", "FPARec")}


def damaged(run: Path, folder: Path, value: float, everywhere: bool = False) -> tuple[Path, list]:
    """A copy with ``value`` in one weight of one parameter, or as all of all; the names."""
    copy = folder / "run"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns(*PICTURES))
    state = torch.load(copy / "checkpoint.pt", weights_only=True)
    model = recbole_pos.load(run).model
    names = [name for name, _ in model.named_parameters()]
    names = names if everywhere else [names[len(names) // 2]]
    for weights in (state["weights"], state["best_weights"]):
        for name in names:
            weights["state_dict"][name].view(-1)[slice(None) if everywhere else -1] = value
    torch.save(state, copy / "checkpoint.pt")
    return copy, names


@pytest.mark.parametrize("command", [*COMMANDS, "inspect because"])
def test_a_parameter_that_is_no_number_is_named(
    runs: dict[str, Path], tmp_path: Path, capsys, command: str
) -> None:
    words, model = COMMANDS.get(command, BECAUSE)
    run, names = damaged(runs[model], tmp_path, math.nan)
    assert main([*words, str(run)]) == 2
    printed = capsys.readouterr().err
    assert names[0] in printed and str(run / "checkpoint.pt") in printed
    assert not [file for kind in PICTURES for file in run.glob(kind)]


@pytest.mark.long
@pytest.mark.parametrize("value", [1e30, -3e38], ids=str)
@pytest.mark.parametrize("command", COMMANDS)
def test_weights_out_of_all_proportion_are_told(
    runs: dict[str, Path], tmp_path: Path, capsys, command: str, value: float
) -> None:
    """They are numbers, and may be drawn; what they lead to may be none, and is then refused."""
    words, model = COMMANDS[command]
    run, _ = damaged(runs[model], tmp_path, value, everywhere=True)
    code = main([*words, str(run)])
    printed = capsys.readouterr().err
    assert code in (0, 2)
    assert ("too large to compute with" in printed) == (code == 2)


def test_a_checkpoint_file_is_named(runs: dict[str, Path], tmp_path: Path, capsys) -> None:
    run, names = damaged(runs["PosSASRec"], tmp_path, math.nan)
    whole = tmp_path / "whole"
    shutil.copytree(runs["PosSASRec"], whole)
    shutil.copy(run / "checkpoint.pt", whole / "later.pt")
    assert main([*ATTENTION, str(whole)]) == 0
    assert main([*ATTENTION, str(whole / "later.pt")]) == 2
    printed = capsys.readouterr().err
    assert names[0] in printed and str(whole / "later.pt") in printed
