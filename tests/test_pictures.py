"""Pictures: what they show, of damaged runs, too; that nothing is cut and ticks can be read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from conftest import train
from matplotlib.axis import Axis
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.errors import UsageError
from recbole_pos.inspect.attention import Measured
from recbole_pos.inspect.attention_report import Periods, draw_measures, draw_periods
from recbole_pos.inspect.encoding import (
    build_encodings,
    compute_agreement,
    compute_session_vectors,
    draw_encoding,
    find_encodings,
)
from recbole_pos.inspect.pictures import new_figure, write
from recbole_pos.inspect.relation_use import RelationUse, draw_relations
from recbole_pos.inspect.run_pictures import (
    HALF_A_LINE,
    draw_attention,
    draw_curves,
    draw_kernel,
    plot_run,
    read_metrics,
)
from recbole_pos.runs.space import Parameter, Space
from recbole_pos.tuning.plot import draw_pictures
from recbole_pos.tuning.record import Trial

PNG = b"\x89PNG"
METRIC = "giniindex@10"


# --- pictures of a run ---


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two encodings and a kernel, for which a lower metric is better."""
    given = {"position": ["ldpe", "kernel", "learned"], "hidden_size": 8, "epochs": 3, "topk": [10]}
    given |= {"metrics": ["NDCG", "GiniIndex"], "valid_metric": "GiniIndex@10"}
    return train(tiny, tmp_path_factory.mktemp("run") / "run", "PosSASRec", **given)


def test_the_command_plot(run: Path, trained, tmp_path: Path, capsys, monkeypatch) -> None:
    """What a model has is drawn, the best epoch marked where lower is better."""
    files = ["curves.png", "attention.png", "kernel.png", "positions.png"]
    assert main(["plot", str(run)]) == 0
    assert capsys.readouterr().out.split() == [str(run / f) for f in files]
    assert all((run / file).read_bytes().startswith(PNG) for file in files)
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)
    other = plot_run(trained("FPARec", position=["fparec"]))
    assert [file.name for file in other] == files[:2]
    assert main(["plot", str(tmp_path)]) == 2
    assert "not a run folder" in capsys.readouterr().err


def line(epoch: int, score: float | None = 0.5, **others) -> bytes:
    valid = None if score is None else {"hit@10": 0.1, METRIC: score}
    content = {"epoch": epoch, "loss": 4.0, "valid": valid, "seconds": 0.1, **others}
    return json.dumps(content).encode() + b"\n"


WHOLE = line(0) + line(1)
LINE_3 = {
    "binary rubbish": b"\x80\x00\xff\xfe{\n",
    "nested too deeply": b"[" * 100_000 + b"\n",
    "epoch is true": line(True),
    "an earlier epoch": line(0),
    "metric missing": line(2, valid={"hit@10": 0.5}),
    "metric is infinite": line(2, float("inf")),
}


@pytest.mark.parametrize("damage", LINE_3)
def test_a_damaged_line_of_metrics_is_named(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(WHOLE + LINE_3[damage])
    with pytest.raises(UsageError) as error:
        read_metrics(file, METRIC)
    assert str(error.value).startswith(f"{file}, line 3: ")
    assert f"--resume {tmp_path}" in str(error.value)


def test_half_a_last_line_of_metrics_is_left_out(tmp_path: Path) -> None:
    """As a killed process or a power cut leaves it; a line without its end is whole."""
    file = tmp_path / "metrics.jsonl"
    halves = [line(2)[:cut] for cut in (1, len(line(2)) // 2, len(line(2)) - 2)]
    for rest in (*halves, b"\0" * 100):
        file.write_bytes(WHOLE + rest)
        history, note = read_metrics(file, METRIC)
        assert len(history) == 2 and note == HALF_A_LINE
    for end in (b"", b"\n\n", b"\r\n"):
        file.write_bytes(WHOLE + line(2).rstrip() + end)
        history, note = read_metrics(file, METRIC)
        assert len(history) == 3 and not note


def test_a_run_without_a_whole_line_of_metrics(run: Path, tmp_path: Path, capsys) -> None:
    file = run / "metrics.jsonl"
    kept = file.read_bytes()
    for content, message in ((b"\n \n", "no finished epoch yet"), (b'{"epo', "line 1: ")):
        file.write_bytes(content)
        assert main(["plot", str(run)]) == 2
        assert message in capsys.readouterr().err
    file.write_bytes(kept)
    with pytest.raises(UsageError):
        read_metrics(tmp_path, METRIC)  # a folder


def test_the_marked_epoch_is_the_one_that_is_kept(run: Path, figures: dict[str, Figure]) -> None:
    """Where lower is better; of equal epochs the latest, as early stopping keeps its weights."""
    plot_run(run)
    curve, dot = figures["curves.png"].axes[1].lines
    kept = json.loads((run / "result.json").read_text())["best_epoch"]
    assert dot.get_xdata().tolist() == [kept]
    assert dot.get_ydata().tolist() == [min(curve.get_ydata())] != [max(curve.get_ydata())]
    for bigger, values in ((True, [0.1, 0.3, 0.3, 0.2]), (False, [0.3, 0.1, 0.1, 0.2])):
        history = [{"epoch": n, "loss": 1.0, "valid": {"m": x}} for n, x in enumerate(values)]
        draw_curves(history, "m", bigger, ["title"], Path("x.png"))
        assert figures["x.png"].axes[1].lines[1].get_xdata() == [2]


# --- position encodings ---


def row(printed: str, name: str) -> list[str]:
    (line,) = (line for line in printed.splitlines() if line.split()[:1] == [name])
    return line.split()


def test_fixed_encodings(tmp_path: Path, monkeypatch, capsys) -> None:
    """By default those of the paper's pictures, at its sizes, where one stands."""
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "encoding"]) == 0
    printed = capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["encoding_dpe.png", "encoding_spe.png"]
    assert row(printed, "spe") == ["spe", "0-99", "no", "yes"]
    assert row(printed, "dpe") == ["dpe", "0-49", "50-99", "yes"]
    scheme = build_encodings(["dpe"], 20, None)["dpe"]
    short, long = (compute_session_vectors(scheme, length) for length in (10, 20))
    np.testing.assert_array_equal(short, np.hstack((long[:10, :50], long[10:, 50:])))
    assert short.shape == (10, 100) and long[0, 50] == pytest.approx(np.sin(19))
    # in float32 sines of the slowest columns would be straight lines
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)
    arguments = ["aspe", "--length", "3", "--out", str(tmp_path / "new")]
    assert main(["inspect", "encoding", *arguments]) == 0
    assert row(capsys.readouterr().out, "aspe")[1:3] == ["no", "no"]


def test_encodings_of_a_trained_model(run: Path, capsys) -> None:
    """Its own weights, found by type; into its folder."""
    assert main(["inspect", "encoding", "--checkpoint", str(run), "--length", "5", "12"]) == 0
    printed = capsys.readouterr().out
    assert row(printed, "ldpe")[1:] == ["0-3", "4-7", "yes"]
    assert row(printed, "learned")[1:] == ["no", "0-7", "yes"]  # from the newest by default
    assert (run / "encoding_ldpe.png").read_bytes().startswith(PNG)
    model = recbole_pos.load(run).model.cpu()
    assert list(find_encodings(model)) == ["ldpe", "learned"]
    weight = model.position_embedding.schemes["ldpe"].weight.detach().numpy()
    found = compute_session_vectors(find_encodings(model)["ldpe"], 5)
    np.testing.assert_array_equal(found, np.hstack((weight[:5, :4], weight[4::-1, 4:])))


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["ldpe"], "ldpe"),
        (["rope"], "rope"),
        (["spe", "--length", "1", "5"], "--length: "),
        (["spe", "--hidden_size", "0"], "--hidden_size: "),
        (["--checkpoint", "RUN"], "--length: ldpe"),
        (["RUN"], "--length: ldpe"),
        (["RUN", "spe"], "spe: "),
        (["no/run"], "no/run is not a run folder"),
        (["spe", "--checkpoint", "RUN"], "spe: "),
        (["--checkpoint", "RUN", "--hidden_size", "8"], "--hidden_size: "),
    ],
    ids=str,
)
def test_encodings_that_cannot_be_drawn(
    run: Path, tmp_path, monkeypatch, refused, arguments, option
):
    monkeypatch.chdir(tmp_path)
    given = [run if word == "RUN" else word for word in arguments]
    refused(["inspect", "encoding", *given], f"error: {option}")
    assert not list(tmp_path.iterdir())


def test_agreement_of_positions_is_that_of_the_paper() -> None:
    """exp(p_i . p_j / sqrt(d)) over the events up to i, by their largest (FPARec, appendix A)."""
    t, d = 7, 5
    p = np.random.default_rng(0).normal(size=(t, d))
    expected = np.zeros((t, t))
    for i in range(t):
        logits = [sum(p[i, c] * p[j, c] for c in range(d)) / math.sqrt(d) for j in range(i + 1)]
        for j in range(i + 1):
            expected[i, j] = math.exp(logits[j]) / max(map(math.exp, logits))
    np.testing.assert_allclose(compute_agreement(p), expected, rtol=1e-12)
    assert np.isfinite(compute_agreement(1e3 * p)).all()  # long vectors, too
    assert (compute_agreement(np.zeros((t, d))) == np.tri(t)).all()


# --- every picture, in its extremes: one of everything, and much of it with long names ---

SHORT = "FPARec (fparec) on ml-100k"
LONG = "A$Model^$Name_of_its_own (learned, to_rope, kernel) on " + "somebodys^data_" * 8
RNG = np.random.default_rng(0)


def attention(layers: int, heads: int, n: int, name: str) -> Callable[[Path], object]:
    weights = [np.tril(RNG.random((heads, n, n))) for _ in range(layers)]
    return lambda file: draw_attention(weights, (name, "what is shown"), "weight", file)


def kernel(factors: int, name: str) -> Callable[[Path], object]:
    found = {f"U, layer {n + 1}": np.eye(50) for n in range(factors - 1)}
    found["L, all layers"] = np.eye(50) + 0.01 * np.tril(RNG.random((50, 50)))
    return lambda file: draw_kernel(found, name, file)


def periods(layers: int, groups: int, name: str) -> Callable[[Path], object]:
    hours, started = (0.003, 24.0, 170.0, 1e7), (0.004, 20.0, 100.0, 1e7)
    near = ("", "day", "week", "")
    found = [
        Periods(layer, "to_rope", (head,), groups == 1, hours, started, near, 4)
        for layer in range(1, layers + 1)
        for head in range(1, groups + 1)
    ]
    return lambda file: draw_periods(found, name, file)


def relations(fields: list[str], layers: int, heads: int, name: str) -> Callable[[Path], object]:
    uses = [
        RelationUse(f, "item", 1.0, 5.0, 0.5, [0.3] * layers, [[0.1] * heads] * layers, [])
        for f in fields
    ]
    none = [float("nan")] * layers
    uses.append(RelationUse("country, age", "user", 1.0, 5.0, 0.5, none, [], none))
    return lambda file: draw_relations(uses, name, file)


def search(names: list[str], name: str) -> Callable[[Path], object]:
    """Five trials of a search whose metric is better where lower."""
    parameters = [Parameter(names[0], "loguniform", [1e-4, 1e-2], "")]
    choices = [["rope"], ["rope", "kernel"], "a_choice_of_a_very_long_name_indeed"]
    parameters += [Parameter(option, "choice", choices, "") for option in names[1:]]
    trials = []
    for n, state in enumerate(("finished", "finished", "stopped", "failed", "finished")):
        options = {p.name: p.values[n % len(p.values)] for p in parameters}
        curve = {epoch: (0.1 + n / 50) * (1 - abs(epoch - 3) / 9) for epoch in range(1, 6)}
        best = max(curve, key=curve.get)
        trials.append(Trial(n, options, state, score=curve[best], best_epoch=best, curve=curve))
    return lambda file: draw_pictures(
        trials, trials[0], Space(parameters), METRIC, "min", name, file.parent
    )


MEASURED = Measured([RNG.random((2, 3, 8)) for _ in range(8)], RNG.random((2, 3)), False)
PICTURES = {
    "curves of one epoch": lambda file: draw_curves(
        [{"epoch": 0, "loss": 9.0, "valid": {"m": 0.1}}], "m", True, (SHORT, "a word"), file
    ),
    "curves without validation": lambda file: draw_curves(
        [{"epoch": 0, "loss": 9.0, "valid": None}], "m", True, (SHORT, "a word"), file
    ),
    "attention of two heads in 4 layers": attention(4, 2, 30, LONG),
    "kernels of 4 layers": kernel(5, LONG),
    "measures of 8 layers": lambda file: draw_measures(MEASURED, LONG, file),
    "periods of 8 layers": periods(8, 8, LONG),
    "encoding of 2": lambda file: draw_encoding({2: np.eye(2)}, LONG, file),
    "relations of 8 layers": relations(
        ["brand", "a^field", "$", "a_field_whose_name_goes_on_" * 4], 8, 8, LONG
    ),
    "a search of 8 options": search(["learning_rate", *(f"x^{a}$" * 9 for a in "abcdefg")], LONG),
}


@pytest.fixture
def figures(monkeypatch) -> dict[str, Figure]:
    """What is saved, by its file's name; laid out as in the file."""
    found = {}

    def keep(figure: Figure, file: Path, dpi: int) -> None:
        figure.set_dpi(dpi)
        figure.draw_without_rendering()
        found[Path(file).name] = figure

    monkeypatch.setattr(Figure, "savefig", keep)
    return found


def ticks(axis: Axis) -> list[Text]:
    low, high = sorted(axis.get_view_interval())
    labels = [t.label1 for t in axis.get_major_ticks() if low <= t.get_loc() <= high]
    return [label for label in labels if label.get_visible() and label.get_text()]


@pytest.mark.parametrize("picture", PICTURES)
def test_a_picture_can_be_read(figures: dict[str, Figure], tmp_path: Path, picture: str) -> None:
    PICTURES[picture](tmp_path / "picture.png")
    assert figures
    for figure in figures.values():
        width, height = figure.get_size_inches()
        assert 3 < width < 24 and 2 < height < 32
        renderer = figure.canvas.get_renderer()
        box, slack = figure.get_tightbbox(renderer), 0.02  # inches
        assert min(box.x0, box.y0) > -slack
        assert box.x1 < width + slack and box.y1 < height + slack
        title = figure.get_suptitle()
        name = title.replace("\n", "").replace(" ", "")
        assert any(known.replace(" ", "") in name for known in (SHORT, LONG))
        floor = figure._suptitle.get_window_extent(renderer).y0
        for panel in figure.axes:
            if not panel.get_visible():
                continue
            assert panel.title.get_window_extent(renderer).y1 <= floor + 2
            assert min(panel.get_window_extent().size) > 5  # a colour bar is thin
            for axis in (panel.xaxis, panel.yaxis):
                boxes = [label.get_window_extent(renderer) for label in ticks(axis)]
                if not any(label.get_rotation() for label in ticks(axis)):
                    assert not any(one.overlaps(other) for one, other in pairwise(boxes))
        for text in figure.findobj(Text):
            assert text.get_fontsize() >= 8
            is_formula = text.get_parse_math() and not text.get_text().count("$")
            assert "^" not in text.get_text() or not is_formula


def test_a_kernel_is_shown_without_the_identity(figures: dict, tmp_path: Path) -> None:
    """What it has learned, a hundredth of it here, fills the scale; the last row is event 0."""
    kernel(2, SHORT)(tmp_path / "kernel.png")
    fresh, learned = [panel for panel in figures["kernel.png"].axes if panel.images][:2]
    assert fresh.get_title() == "U - I, layer 1" and learned.get_title() == "L - I, all layers"
    assert (fresh.images[0].get_array() == 0).all()
    assert 0.008 < learned.images[0].get_clim()[1] <= 0.01
    assert list(learned.images[0].get_extent()) == [-49.5, 0.5, 0.5, -49.5]
    draw_attention([np.array([[[0.5, 0.0], [-0.25, 0.1]]])], (SHORT,), "weight", tmp_path / "a.png")
    assert figures["a.png"].axes[0].images[0].get_clim() == (-0.5, 0.5)  # to both sides


def test_the_best_trial_of_a_search_is_marked(figures: dict, tmp_path: Path) -> None:
    search(["learning_rate", "position"], SHORT)(tmp_path / "a.png")
    points = figures["options.png"].axes[0].collections[0]
    heights, colors = points.get_offsets()[:, 1], map(to_hex, points.get_facecolors())
    best = [height for height, color in zip(heights, colors, strict=True) if color == "#d55e00"]
    assert best == [min(heights)]


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write .*nowhere"):
        write(new_figure(3, 3), tmp_path / "nowhere" / "a.png")
