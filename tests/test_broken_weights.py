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

# by command, the model that it is for
COMMANDS = {
    "plot": "FPARec",
    "inspect attention --min_events 5 --checkpoint": "AttrFormer",
    "inspect relations --batches 1 --checkpoint": "AttrFormer",
    "inspect encoding --length 5 --checkpoint": "PosSASRec",
    "inspect because --user u1 --checkpoint": "PosSASRec",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """A small run of each model."""
    folder = tmp_path_factory.mktemp("runs")
    shop = write(folder, tables())
    train(shop, folder / "AttrFormer", epochs=1)
    options = shop_options(shop)
    for key in ("relations", "relation_heads", "relation_size", "top_k"):
        del options[key]
    for model, position in (("PosSASRec", ["ldpe", "to_rope", "kernel"]), ("FPARec", ["fparec"])):
        given = {**options, "epochs": 1, "position": position}
        recbole_pos.run(model, "shop", None, given, run_dir=folder / model, verbose=False)
    return {model: folder / model for model in ("AttrFormer", "PosSASRec", "FPARec")}


def damaged(run: Path, folder: Path, value: float, everywhere: bool = False) -> tuple[Path, str]:
    """A copy with ``value`` in one weight, or in all; the parameter's name."""
    ignored = shutil.ignore_patterns("*.png", "attention.json", "relations.json")
    copy = Path(shutil.copytree(run, folder / "run", ignore=ignored))
    state = torch.load(copy / "checkpoint.pt", weights_only=True)
    names = [name for name, _ in recbole_pos.load(run).model.named_parameters()]
    middle = names[len(names) // 2]
    for weights in (state["weights"], state["best_weights"]):
        for name in names if everywhere else [middle]:
            weights["state_dict"][name].view(-1)[slice(None) if everywhere else -1] = value
    torch.save(state, copy / "checkpoint.pt")
    return copy, middle


@pytest.mark.parametrize(("command", "model"), COMMANDS.items())
def test_a_parameter_that_is_no_number_is_named(runs, tmp_path, capsys, command, model) -> None:
    """And its file, also one beside the run's own checkpoint, which is whole."""
    run, name = damaged(runs[model], tmp_path, math.nan)
    file = run / "checkpoint.pt"
    if "encoding" in command:
        file.rename(run / "later.pt")
        shutil.copy(runs[model] / "checkpoint.pt", run)
        assert main([*command.split(), str(run)]) == 0
        file = run = run / "later.pt"
    assert main([*command.split(), str(run)]) == 2
    printed = capsys.readouterr().err
    assert name in printed and str(file) in printed


@pytest.mark.long
@pytest.mark.parametrize("command", list(COMMANDS)[:4])
def test_weights_too_large_to_compute_with_are_refused(runs, tmp_path, capsys, command) -> None:
    """They are numbers, and may be drawn; what they lead to may be none, and is then refused."""
    run, _ = damaged(runs[COMMANDS[command]], tmp_path, 1e30, everywhere=True)
    code = main([*command.split(), str(run)])
    assert code in (0, 2)
    assert ("too large to compute with" in capsys.readouterr().err) == (code == 2)
