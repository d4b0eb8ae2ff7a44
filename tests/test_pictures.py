"""Pictures: what they show; that nothing is cut and ticks can be read."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text

from recbole_pos.errors import UsageError
from recbole_pos.inspect.attention import draw_attention
from recbole_pos.inspect.pictures import new_figure, write

LONG = "A$Model^$Name_of_its_own (learned, to_rope, kernel) on " + "somebodys^data_" * 8


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


def test_a_picture_can_be_read(figures: dict[str, Figure], tmp_path: Path) -> None:
    """With long names, of four layers: nothing is cut, no ticks overlap."""
    weights = [np.tril(np.random.default_rng(0).random((2, 30, 30)))] * 4
    draw_attention(weights, (LONG, "what is shown"), tmp_path / "picture.png")
    assert figures
    for figure in figures.values():
        width, height = figure.get_size_inches()
        renderer = figure.canvas.get_renderer()
        box, slack = figure.get_tightbbox(renderer), 0.02  # inches
        assert min(box.x0, box.y0) > -slack
        assert box.x1 < width + slack and box.y1 < height + slack
        assert "".join(LONG.split()) in "".join(figure.get_suptitle().split())
        floor = figure._suptitle.get_window_extent(renderer).y0
        for panel in filter(Axes.get_visible, figure.axes):
            assert panel.title.get_window_extent(renderer).y1 <= floor + 2
            for axis in (panel.xaxis, panel.yaxis):
                boxes = [label.get_window_extent(renderer) for label in ticks(axis)]
                if not any(label.get_rotation() for label in ticks(axis)):
                    assert not any(one.overlaps(other) for one, other in pairwise(boxes))
        assert all(text.get_fontsize() >= 8 for text in figure.findobj(Text))


def test_colours_go_to_both_sides_of_zero(figures: dict, tmp_path: Path) -> None:
    """The newest interaction is 0."""
    draw_attention([np.array([[[0.5, 0.0], [-0.25, 0.1]]])], ("a",), tmp_path / "a.png")
    (image,) = figures["a.png"].axes[0].images
    assert image.get_clim() == (-0.5, 0.5)
    assert list(image.get_extent()) == [-1.5, 0.5, 0.5, -1.5]


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write .*nowhere"):
        write(new_figure(3, 3), tmp_path / "nowhere" / "a.png")
