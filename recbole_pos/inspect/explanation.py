"""A picture of why items are recommended: the history on one axis, the items on the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from recbole_pos.errors import UsageError
from recbole_pos.inspect.pictures import SMALL, choose_colors, new_figure, shorten, write

MAX_NAMES = 50  # interactions whose items are named; more are numbered by steps back
MAX_NUMBERS = 400  # cells that show the change of rank


def draw_explanation(effects: pd.DataFrame, file: str | Path, title: str = "") -> Path:
    """Draw why items are recommended: a cell for each item and past interaction of the user.

    Its colour shows by how much the score of the item falls if the interaction is left out of the
    history. If there is room, a number shows by how many ranks the item falls; below 0, it rises.

    Args:
        effects: table that ``Recommender.explain`` returns: a row for each recommended item and
            past interaction.
        file: path to write to, such as ``because.png``; it is returned.
        title: title of the picture, such as whose history it is.

    Raises:
        UsageError: if the history has only one interaction, or the file cannot be written.
    """
    if effects["steps_back"].max() == 1:
        raise UsageError(
            "history: it has one known interaction only, without which nothing is left"
        )

    # Matrices [items, past interactions], oldest first: steps_back counts from the newest, so the
    # order of the columns is turned round.
    items = effects.drop_duplicates("item").set_index("item")
    tables = effects.pivot(index="item", columns="steps_back").loc[items.index]
    loss = -tables["score_change"].to_numpy()[:, ::-1]
    rank_change = tables["rank_change"].to_numpy(int)[:, ::-1]
    past = tables["past"].iloc[0].to_list()[::-1]
    num_items, length = loss.shape

    figure = new_figure(min(3.5 + 0.34 * length, 17), 2.6 + 0.34 * num_items)

    # A cell for each item and interaction, with names on both axes, or numbers if there are many.
    panel = figure.subplots()
    image = panel.imshow(loss, aspect="auto", interpolation="nearest", **choose_colors([loss]))
    labels = [f"{shorten(str(name))}  ({rank})" for name, rank in items["rank"].items()]
    panel.set_yticks(range(num_items), labels)
    panel.set(ylabel="item (rank)", xlabel="past interaction, the newest on the right")
    if length <= MAX_NAMES:
        panel.set_xticks(range(length), [shorten(str(name)) for name in past], rotation=90)
    else:
        ticks = np.arange(length - 1, -1, -(length // 10))
        panel.set_xticks(ticks, [str(length - tick) for tick in ticks])
        panel.set_xlabel("past interaction, steps back (1: the newest)")
    panel.tick_params(labelsize=SMALL)
    for text in (*panel.get_xticklabels(), *panel.get_yticklabels()):
        text.set_parse_math(False)  # a dollar in a name does not start a formula

    # Numbers in the cells: by how many ranks the item falls.
    caption = ""
    if loss.size <= MAX_NUMBERS:
        caption = "numbers: ranks it falls without the interaction"
        dark_loss = 0.6 * np.abs(loss).max()  # a larger loss has a cell too dark for black text
        for row, column in zip(*np.nonzero(rank_change), strict=True):
            color = "white" if abs(loss[row, column]) > dark_loss else "black"
            style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": SMALL - 1}
            panel.text(column, row, f"{rank_change[row, column]:+d}", color=color, **style)
    figure.colorbar(image, ax=panel, label="score lost without it")
    return write(figure, file, title, caption)
