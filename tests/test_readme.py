"""The README's code works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from recbole_pos.config import defaults as properties
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.experiment.build import prepare
from recbole_pos.model.models import BUILTIN_GENERAL, BUILTIN_SEQUENTIAL
from recbole_pos.position.schemes import SCHEMES
from recbole_pos.tune.check import check_space
from recbole_pos.tune.files import read_space

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


def test_the_python_example(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = (block for block in BLOCKS if "recbole_pos.run" in block)
    names: dict = {}
    exec(example, names)
    assert names["trained"].model.training is False
    assert f"{names['result'].test['ndcg@10']}" in capsys.readouterr().out


def test_the_new_scheme(tiny: Path, tmp_path: Path, monkeypatch) -> None:
    """Class, registry line and yaml are all it takes."""
    (example,) = (block for block in BLOCKS if "class FallingBias" in block)
    names: dict = {}
    exec(example, names)
    yaml = tmp_path / "position"
    yaml.mkdir()
    for file in (properties.ROOT / "position").iterdir():
        (yaml / file.name).write_text(file.read_text())
    (yaml / "falling_bias.yaml").write_text("falling_slope: 0.5  # (float) Slope.\n")
    for name in ("model", "overall.yaml"):
        (tmp_path / name).symlink_to(properties.ROOT / name)
    monkeypatch.setattr(properties, "ROOT", tmp_path)
    monkeypatch.setitem(SCHEMES, "falling_bias", names["FallingBias"])
    options = {"data_path": str(tiny), "position": ["falling_bias"], "falling_slope": 0.25}
    made = prepare(PosConfig("PosSASRec", "tiny", None, options))
    loss = made.trainer._train_epoch(
        made.trainer.training_loader(made.loaders["train"]), epoch_idx=0
    )["loss"]
    assert torch.isfinite(torch.tensor(loss))
    first = made.model.trm_encoder.layer[0].multi_head_attention.position
    assert first.schemes["falling_bias"].slopes.flatten().tolist() == [0.25, 0.0625]


def test_the_space_of_a_search(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    (tmp_path / "space.yaml").write_text(block)
    space = read_space(tmp_path / "space.yaml")
    check_space(space, lambda more: PosConfig("PosSASRec", "ml-100k", None, more))
    assert {"rope", "kernel"} == {name for o in space.parameters[2].values for name in o}
    drawn = [space.draw(np.random.default_rng(seed)) for seed in range(20)]
    assert all(("kernel_l" in options) == ("kernel" in options["position"]) for options in drawn)


def test_the_count_of_recbole_models() -> None:
    readme = (ROOT / "README.md").read_text()
    assert f"{len(BUILTIN_SEQUENTIAL) + len(BUILTIN_GENERAL)} of RecBole's models" in readme


@pytest.mark.parametrize(
    "link", re.findall(r"\]\(((?!http)[^)]+)\)", (ROOT / "README.md").read_text())
)
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link).is_file()
