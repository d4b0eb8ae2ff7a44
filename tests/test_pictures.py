"""Every picture of the package: nothing is cut, ticks can be read, titles name it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axis import Axis
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from recbole_pos.errors import UsageError
from recbole_pos.inspect.attention_report import Periods, draw_measures, draw_periods
from recbole_pos.inspect.distance import Measured
from recbole_pos.inspect.encoding import agreement, draw_encoding
from recbole_pos.inspect.pictures import draw_triangles, new_figure, write
from recbole_pos.inspect.relation_use import RelationUse, draw_relations
from recbole_pos.inspect.run_pictures import draw_attention, draw_curves, draw_kernel
from recbole_pos.runs.space import Parameter, Space
from recbole_pos.tuning.plot import draw
from recbole_pos.tuning.record import Trial

SHORT = "FPARec (fparec) on ml-100k"
LONG = "A$Model^$Name_of_its_own (learned, to_rope, kernel) on " + "somebodys^data_" * 8
RNG = np.random.default_rng(0)


def curves(epochs: int, name: str, validated: bool = True) -> Callable[[Path], object]:
    values = RNG.random(epochs)
    history = [
        {"epoch": n, "loss": 9 - v, "valid": {"ndcg@10": v / 10} if validated else None}
        for n, v in enumerate(values.tolist())
    ]
    return lambda file: draw_curves(history, "ndcg@10", True, (name, "a word"), file)


def attention(layers: int, heads: int, n: int, name: str) -> Callable[[Path], object]:
    weights = [np.tril(RNG.random((heads, n, n))) for _ in range(layers)]
    return lambda file: draw_attention(weights, (name, "what is shown"), "weight", file)


def kernel(factors: int, name: str) -> Callable[[Path], object]:
    found = {f"U, layer {n + 1}": np.eye(50) for n in range(factors - 1)}
    found["L, all layers"] = np.eye(50) + 0.01 * np.tril(RNG.random((50, 50)))
    return lambda file: draw_kernel(found, name, file)


def positions(names: list[str], t: int, name: str) -> Callable[[Path], object]:
    found = {kind: agreement(0.1 * RNG.normal(size=(t, 8))) for kind in names}
    return lambda file: draw_triangles(found, (name, "what is shown"), "weight", file)


def measures(layers: int, heads: int, kinds: int, name: str) -> Callable[[Path], object]:
    found = [RNG.random((2, kinds, heads)) for _ in range(layers)]
    measured = Measured(found, RNG.random((2, kinds)), False)
    return lambda file: draw_measures(measured, name, file)


def periods(layers: int, groups: int, name: str) -> Callable[[Path], object]:
    hours, started = (0.003, 24.0, 170.0, 1e7), (0.004, 20.0, 100.0, 1e7)
    near = ("", "day", "week", "")
    found = [
        Periods(layer, "to_rope", (head,), groups == 1, hours, started, near, 4)
        for layer in range(1, layers + 1)
        for head in range(1, groups + 1)
    ]
    return lambda file: draw_periods(found, name, file)


def encoding(lengths: list[int], d: int, name: str) -> Callable[[Path], object]:
    vectors = {n: RNG.normal(size=(n, d)).astype(np.float32) for n in lengths}
    return lambda file: draw_encoding(vectors, name, file)


def relations(fields: list[str], layers: int, heads: int, name: str) -> Callable[[Path], object]:
    uses = [
        RelationUse(f, "item", 1.0, 5.0, 0.5, [0.3] * layers, [[0.1] * heads] * layers, [])
        for f in fields
    ]
    none = [float("nan")] * layers
    uses.append(RelationUse("country, age", "user", 1.0, 5.0, 0.5, none, [], none))
    return lambda file: draw_relations(uses, name, file)


def trial(number: int, score: float, options: dict, state: str = "finished") -> Trial:
    curve = {n: score * (1 - abs(n - 3) / 9) for n in range(1, 6)}
    best = max(curve, key=curve.get)
    return Trial(number, options, state, score=curve[best], best_epoch=best, curve=curve)


def space(names: list[str]) -> Space:
    parameters = [Parameter(names[0], "loguniform", [1e-4, 1e-2], "")]
    choices = [["rope"], ["rope", "kernel"], "a_choice_of_a_very_long_name_indeed"]
    parameters += [Parameter(name, "choice", choices, "") for name in names[1:]]
    return Space(parameters)


def search(names: list[str], trials: int, name: str, mode: str = "max") -> Callable:
    found = space(names)
    values = [{p.name: p.values[n % len(p.values)] for p in found.parameters} for n in range(9)]
    states = ["finished", "finished", "stopped", "failed"]
    made = [trial(n, 0.1 + n / 50, values[n % 9], states[n % 4]) for n in range(trials)]
    return lambda file: draw(made, found, "giniindex@10", mode, name, file.parent)


WIDE_FIELDS = ["brand", "a^field", "$", "a_field_whose_name_goes_on_" * 4]
WIDE_OPTIONS = [f"x^{letter}$" * 9 for letter in "abcdefg"]
# The extremes of each kind: one of everything, and much of it with long names.
PICTURES = {
    "curves of one epoch": curves(1, SHORT),
    "curves without validation": curves(2, SHORT, validated=False),
    "attention of two heads in 4 layers": attention(4, 2, 30, LONG),
    "positions of one event": positions(["learned"], 1, LONG),
    "kernels of 4 layers": kernel(5, LONG),
    "measures of 8 layers": measures(8, 8, 3, LONG),
    "periods of 8 layers": periods(8, 8, LONG),
    "encoding of 2": encoding([2], 1, LONG),
    "one relation": relations(["brand"], 1, 1, SHORT),
    "relations of 8 layers": relations(WIDE_FIELDS, 8, 8, LONG),
    "a search of 8 options": search(["learning_rate", *WIDE_OPTIONS], 5, LONG, "min"),
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
    """The labels of an axis that can be seen."""
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
        box = figure.get_tightbbox(renderer)
        slack = 0.02  # inches
        assert box.x0 > -slack and box.y0 > -slack
        assert box.x1 < width + slack and box.y1 < height + slack
        title = figure.get_suptitle()
        name = title.replace("\n", "").replace(" ", "")
        assert (SHORT.replace(" ", "") in name) or (LONG.replace(" ", "") in name)
        assert all(line.strip() for line in title.split("\n"))
        floor = figure._suptitle.get_window_extent(renderer).y0
        for panel in figure.axes:
            if not panel.get_visible():
                continue
            assert panel.title.get_window_extent(renderer).y1 <= floor + 2
            assert min(panel.get_window_extent().size) > 5  # a colour bar is thin
            for axis in (panel.xaxis, panel.yaxis):
                boxes = [label.get_window_extent(renderer) for label in ticks(axis)]
                turned = any(label.get_rotation() for label in ticks(axis))
                for one, other in [] if turned else pairwise(boxes):
                    assert not one.overlaps(other), [label.get_text() for label in ticks(axis)]
        for text in figure.findobj(Text):
            assert text.get_fontsize() >= 8
            assert (
                "^" not in text.get_text()
                or text.get_text().count("$")
                or not text.get_parse_math()
            )


def test_heat_maps_are_of_events_from_the_newest(figures: dict, tmp_path: Path) -> None:
    attention(2, 2, 30, SHORT)(tmp_path / "attention.png")
    panels = [panel for panel in figures["attention.png"].axes if panel.images][:4]
    assert [panel.get_title() for panel in panels] == [
        "layer 1, head 1",
        "layer 2, head 1",
        "layer 1, head 2",
        "layer 2, head 2",
    ]
    assert panels[2].get_xlabel() == "key event (0: newest)"
    assert panels[2].get_ylabel() == "query event (0: newest)"
    for panel in panels:
        image = panel.images[0]
        assert list(image.get_extent()) == [-29.5, 0.5, 0.5, -29.5]  # the last row is event 0
        assert image.origin == "upper"


def test_a_kernel_is_shown_without_the_identity(figures: dict, tmp_path: Path) -> None:
    """So that what it has learned, a hundredth of it here, fills the scale."""
    kernel(2, SHORT)(tmp_path / "kernel.png")
    fresh, learned = [panel for panel in figures["kernel.png"].axes if panel.images][:2]
    assert fresh.get_title() == "U - I, layer 1" and learned.get_title() == "L - I, all layers"
    assert (fresh.images[0].get_array() == 0).all()
    assert 0.008 < learned.images[0].get_clim()[1] <= 0.01
    assert "without the identity" in figures["kernel.png"].get_suptitle()


def test_scales(figures: dict, tmp_path: Path) -> None:
    """Of a fresh kernel, where all is zero, and of weights below zero, to both sides."""
    draw_kernel({"L, all layers": np.eye(5)}, SHORT, tmp_path / "kernel.png")
    assert figures["kernel.png"].axes[0].images[0].get_clim() == (0, 1)
    draw_attention([np.array([[[0.5, 0.0], [-0.25, 0.1]]])], (SHORT,), "weight", tmp_path / "a.png")
    assert figures["a.png"].axes[0].images[0].get_clim() == (-0.5, 0.5)


def test_the_best_trial_of_a_search_is_marked(figures: dict, tmp_path: Path) -> None:
    search(["learning_rate", "position"], 5, SHORT, "min")(tmp_path / "a.png")
    points = figures["options.png"].axes[0].collections[0]
    heights, colors = points.get_offsets()[:, 1], map(to_hex, points.get_facecolors())
    best = [height for height, color in zip(heights, colors, strict=True) if color == "#d55e00"]
    assert best == [min(heights)]


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write .*nowhere"):
        write(new_figure(3, 3), tmp_path / "nowhere" / "a.png")
