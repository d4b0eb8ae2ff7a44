"""What a space sets beside what is given, where a search keeps its trials, and small spaces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recbole_pos.config.arguments import SearchArguments
from recbole_pos.errors import UsageError
from recbole_pos.runs.space_files import space_of
from recbole_pos.tune.settings import SearchFolder, Settings, read_settings


def settings(tiny: Path, tmp_path: Path, space: str, **given: Any) -> Settings:
    (tmp_path / "space.yaml").write_text(space)
    told = {key: given.pop(key) for key in ("storage",) if key in given}
    options = {"data_path": str(tiny), **given}
    arguments = SearchArguments(num_samples=2, **told)
    return read_settings("PosSASRec", "tiny", tmp_path / "space.yaml", None, options, arguments)


LEARNING = "learning_rate: {choice: [0.01, 0.001]}\n"


def test_a_split_of_the_space_stays(tiny: Path, tmp_path: Path) -> None:
    """Key by key, as from any two sources; what is given wins."""
    space = LEARNING + "eval_args: {split: {GT: [0.8, 0.9]}}\n"
    alone = settings(tiny, tmp_path, space).config()
    assert alone["eval_args"]["split"] == {"GT": [0.8, 0.9]}
    both = settings(tiny, tmp_path, space, eval_args={"cold_items": "keep"}).config()
    assert both["eval_args"]["split"] == {"GT": [0.8, 0.9]}
    assert both["eval_args"]["cold_items"] == "keep"
    split = {"split": {"LS": "valid_and_test"}}
    assert settings(tiny, tmp_path, space, eval_args=split).config()["eval_args"]["split"] == {
        "LS": "valid_and_test"
    }


def test_two_searches_do_not_share_a_storage(tiny: Path, tmp_path: Path) -> None:
    """Folders of the same name would write over each other's trials."""
    storage = str(tmp_path / "storage")
    first = SearchFolder.create(
        tmp_path / "a/s", settings(tiny, tmp_path, LEARNING, storage=storage)
    )
    Path(first.ray_path(first.read())).mkdir(parents=True)  # as Ray does
    other = settings(tiny, tmp_path, LEARNING, storage=storage)
    with pytest.raises(UsageError, match="holds a search already, of another folder"):
        SearchFolder.create(tmp_path / "b/s", other)
    SearchFolder.create(tmp_path / "b/t", settings(tiny, tmp_path, LEARNING, storage=storage))


def test_points_of_a_space_with_conditions() -> None:
    """Fifty, though the product of all counts is half a million."""
    space: dict[str, Any] = {"base": {"choice": list("abcde")}}
    for name in "abcde":
        space[name] = {"choice": list(range(10)), "when": {"base": name}}
    assert space_of(space, {}).points() == 50
    assert space_of({name: {"choice": list(range(10))} for name in "abcde"}, {}).points() is None


def test_parts_of_a_file_for_one_scheme(tiny: Path, tmp_path: Path) -> None:
    """A trial has other schemes than the configuration the file was read for."""
    file = tmp_path / "mine.yaml"
    space = tmp_path / "space.yaml"
    options, told = {"data_path": str(tiny)}, SearchArguments(num_samples=2)
    file.write_text("for:\n  PosSASRec: {n_layers: 1}\n  rope: {rope_base: 100}\n")
    space.write_text("position: {choice: [[rope], [learned]]}\n")
    with pytest.raises(UsageError, match="mine.yaml, for rope: a search that tries or sets"):
        read_settings("PosSASRec", "tiny", space, [str(file)], options, told)
    given = {**options, "position": ["rope"]}
    space.write_text(LEARNING)
    found = read_settings("PosSASRec", "tiny", space, [str(file)], given, told).config()
    assert found["rope_base"] == 100 and found["n_layers"] == 1
    file.write_text("for:\n  PosSASRec: {n_layers: 1}\n")
    space.write_text("position: {choice: [[rope], [learned]]}\n")
    assert read_settings("PosSASRec", "tiny", space, [str(file)], options, told).total == 2
