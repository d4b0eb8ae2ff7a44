"""The sample dataset is what its generator writes, and the guide in docs/data.md works."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml

import recbole_pos
from recbole_pos.yaml_files import read_yaml

ROOT = Path(__file__).parent.parent
SAMPLE = ROOT / "dataset" / "toyshop"
SUFFIXES = ("inter", "user", "item")


def code_block(language: str, section: str = "", page: str = "data.md") -> str:
    """The first block of a language in a page of docs/, or in a section of it."""
    guide = (ROOT / "docs" / page).read_text(encoding="utf-8")
    guide = guide[guide.index(section) :]
    found = re.search(rf"^```{language}\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no {language} block"
    return found[1]


def run_python(*arguments: str | Path, folder: Path) -> None:
    """Run a script in a folder; it must succeed."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_generator_reproduces_the_files(tmp_path: Path) -> None:
    run_python(ROOT / "dataset" / "make_toyshop.py", tmp_path / "again", folder=tmp_path)
    for suffix in SUFFIXES:
        name = f"toyshop.{suffix}"
        assert (tmp_path / "again" / name).read_bytes() == (SAMPLE / name).read_bytes(), name


def convert(folder: Path) -> None:
    """Run the guide's command on the orders.csv of a folder."""
    words = shlex.split(code_block("sh"))
    assert words[:2] == ["recbole-pos", "convert"]
    run_python(ROOT / "run_recbole_pos.py", *words[1:], folder=folder)


@pytest.mark.parametrize("copies", [1, 10])
def test_guide_from_csv_to_run(tmp_path: Path, copies: int) -> None:
    """The guide's csv as it stands, and as ten shops' worth of other customers and products."""
    (tmp_path / "block.csv").write_text(code_block("csv"), encoding="utf-8")
    block = pd.read_csv(tmp_path / "block.csv")
    shops = [block.assign(customer=block["customer"] + f"-{copy}") for copy in range(copies)]
    for copy, shop in enumerate(shops[1:]):
        shop["product"] = shop["product"] + f"-{copy % 5}"
    pd.concat(shops).to_csv(tmp_path / "orders.csv", index=False)
    convert(tmp_path)
    written = read_yaml(tmp_path / "dataset" / "shop" / "shop.yaml")
    printed = yaml.safe_load(code_block("yaml"))  # of what the command writes
    assert {key: written[key] for key in printed} == printed

    options = {"data_path": str(tmp_path / "dataset"), "epochs": 1}
    result = recbole_pos.run(
        "FPARec", "shop", config_dict=options, run_dir=tmp_path / "run", verbose=False
    )
    assert result.epochs == 1
    assert (result.valid_targets, result.test_targets) == (copies, copies)

    relations = tmp_path / "relations.yaml"
    relations.write_text(
        code_block("yaml", "### Relations", "models/attrformer.md"), encoding="utf-8"
    )
    result = recbole_pos.run(
        "AttrFormer", "shop", [relations], options, run_dir=tmp_path / "related", verbose=False
    )
    assert result.epochs == 1

    log = recbole_pos.load(tmp_path / "run").dataset.log
    assert len(log) == len(block) * copies
    assert (log.times[:2] == 1709399131).all()  # 2024-03-02 17:05:31 UTC, exact, twice
