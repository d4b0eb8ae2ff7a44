"""Whether an encoding encodes both ends of a session (Qiu et al., PosRec, section 3).

Vectors [k, d] of all k positions of sessions of 1 to ``max_length`` interactions are compared.
Definitions 3.1 and 3.2 ask for a set of columns for each pair of lengths; here, as in the proof of
theorem 4.1, one set has to serve all. It suffices to try the largest set of columns that are equal
for equal positions: vectors that differ in some of its columns differ in all of it.

Slow sines and cosines of short sessions are equal by mere rounding in float32: ASPE of 100 columns
counts as aware of both ends up to 3 interactions. Use float64.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from recbole_pos.position.additive import PositionEncoding

TOLERANCE = 1e-9  # largest difference of equal numbers


def find_forward_columns(scheme: PositionEncoding, max_length: int) -> list[int]:
    """Return the largest set A of columns in definition 3.1, an empty list if there is none.

    The longest session is ``max_length``, 2 to n.
    """
    position, length = list_positions(max_length)
    return _find_columns(encode_positions(scheme, position, length), position)


def find_backward_columns(scheme: PositionEncoding, max_length: int) -> list[int]:
    """Return the largest set B of columns in definition 3.2; see :func:`find_forward_columns`."""
    position, length = list_positions(max_length)
    return _find_columns(encode_positions(scheme, position, length), length - 1 - position)


def is_unique(scheme: PositionEncoding, max_length: int) -> bool:
    """Return whether the vectors of a session's positions all differ (property 3.3)."""
    position, length = list_positions(max_length)
    vectors = encode_positions(scheme, position, length)
    return all(_all_differ(vectors[length == value]) for value in length.unique())


def list_positions(max_length: int) -> tuple[Tensor, Tensor]:
    """Return positions and session lengths, [k] each, of sessions of 1 to ``max_length``."""
    lengths = torch.arange(1, max_length + 1)
    position = torch.cat([torch.arange(length) for length in lengths.tolist()])
    return position, lengths.repeat_interleave(lengths)


@torch.no_grad()
def encode_positions(scheme: PositionEncoding, position: Tensor, length: Tensor) -> Tensor:
    """Return the vectors [k, d] of positions [k] in sessions of lengths [k], on the CPU."""
    weight = next(itertools.chain(scheme.parameters(), scheme.buffers()), position)
    return scheme.encode(position.to(weight.device), length.to(weight.device)).cpu()


def _find_columns(vectors: Tensor, position: Tensor) -> list[int]:
    """Return the columns equal at equal positions [k]; [] if two positions share them all."""
    extremes = [vectors[position == value].aminmax(dim=0) for value in position.unique()]
    is_equal = torch.stack([high - low <= TOLERANCE for low, high in extremes]).all(0)
    by_position = torch.stack([low for low, _ in extremes])[:, is_equal]
    if not _all_differ(by_position):
        return []
    return is_equal.nonzero().flatten().tolist()


def _all_differ(vectors: Tensor) -> bool:
    """Return whether no two rows of [k, w] are equal."""
    return bool((torch.pdist(vectors, p=torch.inf) > TOLERANCE).all())
