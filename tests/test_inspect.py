"""What ``recbole-pos inspect`` reads of a model, against plain loops; and what pictures show."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import shop
import torch
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text
from schemes import shake

from recbole_pos.cli.main import main
from recbole_pos.errors import UsageError
from recbole_pos.inspect.attention import (
    average_attention,
    compute_layer_inputs,
    draw_attention,
    find_attention_layers,
    inspect_attention,
)
from recbole_pos.inspect.pictures import new_figure, write
from recbole_pos.layers.sequence_batch import SequenceBatch

# --- averaged attention ---


def test_attention_maps_average_the_weights(experiment) -> None:
    """Against each history on its own, in loops over the newest events."""
    made = experiment("PosSASRec", position=["cape", "rope"])
    shake(made.model)
    model, loader, newest = made.model.eval(), made.loaders["test"], 5
    found, caption = average_attention(model, loader, newest)
    total, count = np.zeros((newest, newest)), 0
    layer = model.trm_encoder.layer[0].multi_head_attention
    for batch in loader:
        for row, length in enumerate(batch[0][model.ITEM_SEQ_LEN].tolist()):
            if length >= newest:
                items = batch[0][model.ITEM_SEQ][row][:length]
                one = SequenceBatch.from_lengths(items, torch.tensor([length]), 12)
                weights = layer.weights(model.item_embedding(items), one)[0, 1].detach().numpy()
                total += weights[-newest:, -newest:]
                count += 1
    assert [m.shape for m in found] == [(2, newest, newest)] * 2
    np.testing.assert_allclose(found[0][1], total / count, rtol=1e-4, atol=1e-6)
    assert caption == f"newest 5 of up to 12 interactions of {count} histories"


def test_attention_by_position_is_averaged_too(experiment) -> None:
    """Of the longest histories it is the matrix of the layer, each row divided by its sum."""
    model, loader = (made := experiment("FPARec")).model.eval(), made.loaders["test"]
    found, caption = average_attention(model, loader, newest=12)
    assert caption.endswith("histories of 12 interactions")
    for layer, weights in zip(find_attention_layers(model), found, strict=True):
        scheme = layer.position.schemes["fparec"]
        want = scheme.weights(12).detach()
        torch.testing.assert_close(torch.tensor(weights), want / want.sum(-1, keepdim=True))


def test_the_command_draws_attention(trained, tmp_path: Path, capsys, refused) -> None:
    run = trained("PosSASRec", position=["rope"])
    assert main(["inspect", "attention", str(run)]) == 0
    assert capsys.readouterr().out.split() == [str(run / "attention.png")]
    assert (run / "attention.png").read_bytes().startswith(b"\x89PNG")
    refused(f"inspect attention {tmp_path}", "not a run folder")


def test_models_without_attention_weights_are_refused(trained) -> None:
    with pytest.raises(UsageError, match="token_mixing mixes interactions without"):
        inspect_attention(trained("PosSASRec", position=["token_mixing"]))
    with pytest.raises(UsageError, match="SASRec has no causal attention layers"):
        inspect_attention(trained("SASRec"))


# --- AttrFormer: what is inspected is the network that predicts, relations and all ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shop.write(tmp_path_factory.mktemp("shop"), shop.tables())


@torch.no_grad()
def test_layers_are_given_what_predictions_give_them(folder: Path, double) -> None:
    """Relations from the first layer on, and times though no scheme of the model needs them."""
    made = shop.open_shop(folder, inference_relations="own", chunking=False)
    model = shop.shaken(made)
    assert not model.needs_time
    rows = made.loaders["test"]._dataset[np.arange(6)]
    layers = find_attention_layers(model)
    seen: list[torch.Tensor] = []
    hooks = [m.register_forward_pre_hook(lambda _, given: seen.append(given[0])) for m in layers]
    model.full_sort_predict(rows)
    for hook in hooks:
        hook.remove()
    inputs = compute_layer_inputs(model, layers, rows)
    _, batch = inputs[0]
    assert batch.extras.edges and len(inputs) == 3
    assert all(torch.equal(found, want) for (found, _), want in zip(inputs, seen, strict=True))
    is_real = torch.arange(rows["timestamp_list"].size(1)) < batch.lengths[:, None]
    assert torch.equal(batch.times, rows["timestamp_list"][is_real])


# --- pictures: nothing is cut, and ticks can be read ---


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
