"""Any yaml is read, or refused on one line, within bounds: studies, spaces, options, datasets."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from recbole_pos.cli.main import main
from recbole_pos.errors import UsageError
from recbole_pos.yaml_files import parse_scalar, read_yaml

ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 7)
)
MERGED = "a0: &a0 {k: x}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}], k{n}: 1}}\n" for n in range(1, 7)
)
HOSTILE: dict[str, str | bytes] = {
    "aliases in aliases": ALIASES,
    "merged aliases": MERGED,
    "a long text, often": f"a: &a {'x' * 1_000_000}\nb: [{', '.join(['*a'] * 100)}]\n",
    "an alias in itself": "a: &a [*a]\n",
    "deep": f"a: {'[' * 500}{']' * 500}\n",
    "deep mappings": f"a: {'{a: ' * 500}{'}' * 500}\n",
    "a number without end": f"a: {'1:' * 100_000}1\n",
    "a long name, twice": 2 * f"{'x' * 900}: 1\n",
    "a tag that is not true": "a: !!bool x\n",
    "a time that is not one": "a: !!timestamp x\n",
    "a number that is not one": 'a: !!int ""\n',
    "an unknown alias": f"a: *{'x' * 1000}\n",
    "long": "a: 1\n" * 2_500_000,
    "a key given twice": "epochs: 1\nepochs: 2\n",
    "no UTF-8": b"\xff\xfe\x00",
    "a date that is not one": "a: 2020-13-45",
}


def test_read_within_bounds(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    for text in HOSTILE.values():
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        with pytest.raises(UsageError) as refused:
            read_yaml(file)
        assert str(file) in str(refused.value) and len(str(refused.value)) < 600
        assert "\n" not in str(refused.value)
    file.write_text("".join(f"k{n}: {n}\n" for n in range(20_000)))  # in linear time
    assert len(read_yaml(file)) == 20_000


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("study", "aliases in aliases"),
        ("option", "deep"),
        ("dataset", "a tag that is not true"),
        ("space", "aliases in aliases"),
    ],
)
def test_every_command_reads_so(
    name: str, kind: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Whatever the file is for: one line that names it, exit code 2."""
    file = tmp_path / "a.yaml"
    words = ["-m", "FPARec", "-d", "tiny", "--data_path", str(tiny)]
    command = ["run", *words, "--config_files", str(file)]
    if kind == "study":
        command = ["compare", str(file), "--run_dir", str(tmp_path / "s")]
    elif kind == "dataset":
        file = tmp_path / "tiny" / "tiny.yaml"
        shutil.copytree(tiny / "tiny", file.parent)
        command = ["run", *words[:-1], str(tmp_path)]
    elif kind == "space":
        command = ["tune", *words, "--space", str(file), "--run_dir", str(tmp_path / "s")]
    file.write_text(HOSTILE[name])
    assert main(command) == 2
    message = capsys.readouterr().err
    assert str(file) in message and message.count("\n") == 1 and len(message) < 700
    assert not (tmp_path / "s").exists()


def test_values_of_the_command_line_have_the_same_bounds() -> None:
    deep = "[" * 500 + "]" * 500
    with pytest.raises(UsageError, match="--vary") as refused:
        parse_scalar(deep, "--vary")
    assert len(str(refused.value)) < 600
    shared = "[&a [1, 2], *a]"
    assert parse_scalar(shared, "--x") == [[1, 2], [1, 2]], "aliases as such are fine"
