"""Draws encodings of positions (PosRec, Figures 7 to 12), and says which ends they encode.

    python studies/posrec/encodings.py spe dpe [--out FOLDER]    # fixed ones, d = 100
    python studies/posrec/encodings.py --run RUN_DIR             # those that a run has learned

Writes encoding_NAME.png: above, the encodings of sessions of 10 and 20 interactions, row by row;
below, their dot products within and between the sessions. Prints the columns of definitions 3.1 and
3.2, and whether property 3.3 holds, for sessions of up to 20 interactions.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

import recbole_pos as rp
from recbole_pos.experiment.pictures import choose_colors, write
from recbole_pos.layers.hooks import Dimensions
from recbole_pos.position.additive import PositionEncoding
from recbole_pos.position.schemes import SCHEMES

SHORT, LONG = 10, 20  # interactions of the sessions
TOLERANCE = 1e-9  # largest difference of equal numbers; slow sines need float64


@torch.no_grad()
def list_vectors(scheme: PositionEncoding, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return vectors [k, d], positions [k] and lengths [k] of sessions of 1 to ``longest``."""
    lengths = torch.arange(1, longest + 1)
    position = torch.cat([torch.arange(length) for length in lengths.tolist()])
    length = lengths.repeat_interleave(lengths)
    return scheme.rows(position, length - 1 - position), position, length


def aware_columns(vectors: Tensor, place: Tensor) -> list[int]:
    """Return the largest set of columns that encodes places [k], an empty list if there is none.

    With places from the start it is the set A of definition 3.1, from the end B of definition 3.2.
    The definitions ask for a set for each pair of lengths; here, as in the proof of theorem 4.1,
    one set has to serve all. It suffices to try the largest set of columns that are equal for equal
    places: vectors that differ in some of its columns differ in all of it.
    """
    extremes = [vectors[place == value].aminmax(dim=0) for value in place.unique()]
    is_equal = torch.stack([high - low <= TOLERANCE for low, high in extremes]).all(0)
    by_place = torch.stack([low for low, _ in extremes])[:, is_equal]
    return is_equal.nonzero().flatten().tolist() if all_differ(by_place) else []


def all_differ(vectors: Tensor) -> bool:
    """Return whether no two rows of [k, d] are equal."""
    return bool((torch.pdist(vectors, p=torch.inf) > TOLERANCE).all())


def describe(scheme: PositionEncoding, longest: int) -> tuple[list[int], list[int], bool]:
    """Return forward- and backward-aware columns, and whether vectors of a session all differ."""
    vectors, position, length = list_vectors(scheme, longest)
    is_unique = all(all_differ(vectors[length == value]) for value in length.unique())
    forward, backward = (aware_columns(vectors, x) for x in (position, length - 1 - position))
    return forward, backward, is_unique


def find_encodings(names: Sequence[str], run: Path | None) -> dict[str, PositionEncoding]:
    """Return the encodings of a run, or fixed ones of these names, by name."""
    if run is not None:
        modules = rp.load(run).model.cpu().modules()
        return {type(x).__name__: x for x in modules if isinstance(x, PositionEncoding)}
    sizes = Dimensions(max_length=LONG, hidden_size=100, n_heads=1, initializer_range=0.0)
    torch.set_default_dtype(torch.float64)
    return {name: SCHEMES[name](sizes, **SCHEMES.defaults(name)) for name in names}


def draw(scheme: PositionEncoding, title: str, file: Path) -> None:
    """Draw the vectors of two sessions, and their dot products."""
    vectors, _, length = list_vectors(scheme, LONG)
    sessions = {n: vectors[length == n].double().numpy() for n in (SHORT, LONG)}
    figure = Figure(figsize=(13, 8), layout="constrained")
    top, bottom = figure.subplots(2, 3)
    top[2].set_visible(False)
    colors = choose_colors(list(sessions.values()))
    for panel, (n, session) in zip(top, sessions.items(), strict=False):
        image = panel.imshow(session, aspect="auto", interpolation="nearest", **colors)
        panel.set(xlabel="column of the encoding", ylabel=f"interaction of {n} (0: oldest)")
        panel.set_yticks(range(0, n, 2))
    figure.colorbar(image, ax=top, label="value")
    pairs = ((SHORT, SHORT), (LONG, LONG), (SHORT, LONG))
    products = [sessions[m] @ sessions[n].T for m, n in pairs]
    limits = {"vmin": min(map(np.min, products)), "vmax": max(map(np.max, products))}
    for panel, (m, n), product in zip(bottom, pairs, products, strict=True):
        image = panel.imshow(product, aspect="auto", **limits)
        panel.set(xlabel=f"interaction of {n}", ylabel=f"interaction of {m}")
        panel.set(xticks=range(0, n, 2), yticks=range(0, m, 2))
    figure.colorbar(image, ax=bottom, label="dot product")
    print(write(figure, file, title))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Draw encodings of positions.")
    parser.add_argument("names", nargs="*", metavar="SCHEME")
    parser.add_argument("--run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, help="folder to write to (the run, or here)")
    args = parser.parse_args(arguments)
    for name, scheme in find_encodings(args.names, args.run).items():
        forward, backward, is_unique = describe(scheme, LONG)
        print(f"{name}: unique {is_unique}, forward-aware columns {forward}, backward {backward}")
        draw(scheme, name, (args.out or args.run or Path()) / f"encoding_{name}.png")


if __name__ == "__main__":
    main()
