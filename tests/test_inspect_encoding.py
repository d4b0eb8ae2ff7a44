"""Pictures of encodings, and what the command says about them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.inspect import encoding
from recbole_pos.inspect.encoding import (
    agreement,
    draw_encoding,
    encodings_in,
    fixed_encodings,
    inspect_encoding,
    session_vectors,
)
from recbole_pos.inspect.run_pictures import plot_run

FAST = {"epochs": 1, "hidden_size": 8, "inner_size": 8, "MAX_ITEM_LIST_LENGTH": 12}
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two encodings and one that no encoding of positions is."""
    folder = tmp_path_factory.mktemp("run") / "run"
    options = {**FAST, "data_path": str(tiny), "position": ["ldpe", "rope", "learned"]}
    recbole_pos.run("PosSASRec", "tiny", None, options, run_dir=folder, verbose=False)
    return folder


def drawn(monkeypatch) -> dict[str, dict[int, np.ndarray]]:
    """What is handed to the picture, by its file name."""
    seen = {}

    def keep(vectors: dict[int, np.ndarray], title: str, file: Path) -> Path:
        seen[file.name] = vectors
        return draw_encoding(vectors, title, file)

    monkeypatch.setattr(encoding, "draw_encoding", keep)
    return seen


def row(printed: str, name: str) -> list[str]:
    (line,) = (line for line in printed.splitlines() if line.split()[:1] == [name])
    return line.split()


def test_fixed_encodings(tmp_path: Path, monkeypatch, capsys) -> None:
    """By default those of the paper's pictures, at its sizes, where one stands."""
    seen = drawn(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "encoding"]) == 0
    printed = capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["encoding_dpe.png", "encoding_spe.png"]
    assert (tmp_path / "encoding_dpe.png").read_bytes().startswith(PNG)
    assert row(printed, "spe") == ["spe", "0-99", "no", "yes"]
    assert row(printed, "dpe") == ["dpe", "0-49", "50-99", "yes"]
    assert "encoding_dpe.png" in printed and "up to 20 events" in printed
    vectors = seen["encoding_dpe.png"]
    assert {n: v.shape for n, v in vectors.items()} == {10: (10, 100), 20: (20, 100)}
    np.testing.assert_array_equal(vectors[10][:, :50], vectors[20][:10, :50])
    np.testing.assert_array_equal(vectors[10][:, 50:], vectors[20][10:, 50:])
    assert vectors[20][0, 50] == pytest.approx(np.sin(19))


def test_other_sizes(tmp_path: Path, capsys) -> None:
    arguments = ["--length", "9", "4", "--hidden_size", "7", "--out", str(tmp_path / "new")]
    assert main(["inspect", "encoding", "aspe", "spe2d", *arguments]) == 0
    printed = capsys.readouterr().out
    assert row(printed, "aspe")[1:] == ["no", "no", "yes"]
    assert row(printed, "spe2d")[1:] == ["0-3", "no", "yes"] and "up to 9 events" in printed
    assert len(list((tmp_path / "new").iterdir())) == 2
    # where float32 could not tell: sines of the slowest columns are still straight lines
    assert main(["inspect", "encoding", "aspe", "--length", "3", "--out", str(tmp_path)]) == 0
    assert row(capsys.readouterr().out, "aspe")[1:3] == ["no", "no"]


def test_products_are_of_all_lengths(tmp_path: Path, monkeypatch) -> None:
    """Panels: each length, each length with itself, and pairs; rows are the shorter session's."""
    images = []
    imshow = Axes.imshow

    def keep(self, matrix, **style):
        images.append(np.asarray(matrix))
        return imshow(self, matrix, **style)

    monkeypatch.setattr(Axes, "imshow", keep)
    scheme = fixed_encodings(["dpe"], 5, 8)["dpe"]
    v = {n: session_vectors(scheme, n) for n in (3, 5)}
    draw_encoding(v, "dpe", tmp_path / "dpe.png")
    want = [*v.values(), *(v[a] @ v[b].T for a, b in [(3, 3), (5, 5), (3, 5)])]
    for image, matrix in zip(images, want, strict=True):
        np.testing.assert_array_equal(image, matrix)


def test_a_trained_model(run: Path, monkeypatch, capsys) -> None:
    """Its own weights, found by type; into its folder."""
    seen = drawn(monkeypatch)
    arguments = ["--checkpoint", str(run), "--length", "5", "12"]
    assert main(["inspect", "encoding", *arguments]) == 0
    printed = capsys.readouterr().out
    assert row(printed, "ldpe")[1:] == ["0-3", "4-7", "yes"]
    assert row(printed, "learned")[1:] == ["no", "0-7", "yes"]  # from the newest by default
    model = recbole_pos.load(run).model.cpu()
    weight = model.position_embedding.schemes["ldpe"].weight.detach().numpy()
    found = seen["encoding_ldpe.png"]
    np.testing.assert_array_equal(found[5][:, :4], weight[:5, :4])
    np.testing.assert_array_equal(found[5][:, 4:], weight[:5, 4:][::-1])
    assert (run / "encoding_ldpe.png").read_bytes().startswith(PNG)
    assert inspect_encoding(["learned"], [12], run).files == [run / "encoding_learned.png"]


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["ldpe"], "ldpe"),
        (["rope"], "rope"),
        (["spe", "--length", "1", "5"], "--length: "),
        (["spe", "--hidden_size", "0"], "--hidden_size: "),
        (["--checkpoint", "RUN"], "--length: ldpe"),
        (["spe", "--checkpoint", "RUN"], "spe: "),
        (["--checkpoint", "RUN", "--hidden_size", "8"], "--hidden_size: "),
    ],
    ids=str,
)
def test_errors(run: Path, tmp_path: Path, monkeypatch, capsys, arguments, option) -> None:
    monkeypatch.chdir(tmp_path)
    given = [str(run) if word == "RUN" else word for word in arguments]
    assert main(["inspect", "encoding", *given]) == 2
    assert capsys.readouterr().err.startswith(f"error: {option}")
    assert not list(tmp_path.iterdir())


def test_agreement_of_positions_is_that_of_the_paper() -> None:
    """exp(p_i . p_j / sqrt(d)) over the events up to i, by their largest (FPARec, appendix A)."""
    t, d = 7, 5
    p = np.random.default_rng(0).normal(size=(t, d))
    expected = np.zeros((t, t))
    for i in range(t):
        row = [
            math.exp(sum(p[i, c] * p[j, c] for c in range(d)) / math.sqrt(d)) for j in range(i + 1)
        ]
        for j in range(i + 1):
            expected[i, j] = row[j] / max(row)
    np.testing.assert_allclose(agreement(p), expected, rtol=1e-12)
    assert np.isfinite(agreement(1e3 * p)).all()  # long vectors, too
    assert (agreement(np.zeros((t, d))) == np.tri(t)).all()


def test_a_run_shows_how_its_encodings_agree(run: Path) -> None:
    """One panel an encoding; what is not one (rope) has none."""
    picture = next(file for file in plot_run(run) if file.name == "positions.png")
    assert picture.read_bytes().startswith(PNG)
    model = recbole_pos.load(run).model
    assert list(encodings_in(model)) == ["ldpe", "learned"]
