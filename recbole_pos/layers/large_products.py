"""Products too large for memory, a part at a time: weights, logits, scores of the whole catalogue.

Memory need not grow with the number of items, or with that times the batch. Shapes: c items of a
part, d the size of vectors; a row is a history for which items are ranked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Elements of a chunk of logits or weights. On a CPU, for each thread: 1 MB stays in the cache of a
# core, with 4 MB the loss on ml-100k takes a quarter longer. A GPU needs larger products.
CHUNK_ELEMENTS = {"cpu": 2**18, "cuda": 2**26}

PART = 1 << 15  # items that are scored at once
GROUP = 64  # columns of a group in ``_select_in_groups``, which compares their maxima first

Scores = Callable[[Tensor], Tensor]
Parts = Iterable[tuple[Tensor, Tensor]]


def chunk_elements(device: torch.device) -> int:
    """Return how many elements a chunk of logits or weights has on a device."""
    if device.type == "cpu":
        return CHUNK_ELEMENTS["cpu"] * torch.get_num_threads()
    return CHUNK_ELEMENTS["cuda"]


def fixed_chunk_elements(device: torch.device) -> int:
    """Return a larger size that does not depend on threads, where it decides what is computed."""
    return 4 * CHUNK_ELEMENTS["cpu"] if device.type == "cpu" else CHUNK_ELEMENTS["cuda"]


def iterate_chunks(num_rows: int, row_elements: int, device: torch.device) -> Iterator[slice]:
    """Yield slices of consecutive rows, so that each has about as many elements as a chunk may.

    With 10 rows of 1,000 elements and chunks of 4,000 they are 0:4, 4:8 and 8:12. A traced graph
    must not depend on the number of slices, so tracing gets one slice of all rows.

    Args:
        num_rows: number of rows in all.
        row_elements: elements that are computed for a row.
        device: decides how many elements a chunk has, see :func:`chunk_elements`.
    """
    if torch.compiler.is_compiling():
        yield slice(None)
        return
    rows_per_chunk = max(1, chunk_elements(device) // row_elements)
    for start in range(0, num_rows, rows_per_chunk):
        yield slice(start, start + rows_per_chunk)


def compute_in_chunks(
    function: Callable[..., Tensor], tensors: Sequence[Tensor | None], row_elements: int
) -> Tensor:
    """Return ``function(*tensors)``, computed for a chunk of rows at a time.

    Nothing that the function makes on its way is kept: the backward pass computes each chunk again.
    A tensor with one row, or None, is handed to every chunk as it is.

    Args:
        function: computes the rows of its result from the same rows of the tensors; not random.
        tensors: [n, ...] the first one; the others too, or [1, ...] for all rows, or None.
        row_elements: elements that the function makes for a row.

    Returns:
        [n, ...], the rows of all chunks joined.
    """
    rows = tensors[0]
    assert rows is not None
    rows_per_chunk = max(1, chunk_elements(rows.device) // row_elements)
    if torch.compiler.is_compiling() or len(rows) <= rows_per_chunk:
        return function(*tensors)

    # the chunks of each tensor; a tensor that all rows share, or None, is the same in every chunk
    chunks = [repeat(x) if x is None or len(x) == 1 else x.split(rows_per_chunk) for x in tensors]
    # ``checkpoint`` computes a chunk again in the backward pass
    results = [
        checkpoint(function, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(*chunks, strict=False)  # ``repeat`` has no end
    ]
    return torch.cat(results)


# --- scores of the catalogue ---


@dataclass(frozen=True)
class Choice:
    """Which items are ranked, and what is added to their scores.

    Attributes:
        items: [n] int64 ids in ascending order.
        bonus: [n] numbers to add to the scores of ``items``, or None.
    """

    items: Tensor
    bonus: Tensor | None = None

    def find_columns(self, items: Tensor) -> Tensor:
        """Return the index of each id among the ranked ``items``; -1 if it is not ranked.

        Ranked items have ascending ids, so that bisection finds where an id is, or would be. With
        the ranked items 2, 5, 7 the ids 7 and 3 have the indices 2 and -1.
        """
        column = torch.searchsorted(self.items, items).clamp_(max=len(self.items) - 1)
        return torch.where(self.items[column] == items, column, -1)


def score_parts(
    scores: Scores, choice: Choice, barred: tuple[Tensor, Tensor] | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Score the items to be ranked for every history, ``PART`` items at a time.

    Parts bound the memory, which would otherwise grow with the number of items.

    Args:
        scores: function of ids [c] that returns the scores [rows, c], a row for each history.
        choice: the items to rank, and what is added to their scores.
        barred: [p] rows and [p] ids of the pairs to exclude, such as items that a user has seen:
            their score becomes -inf. None excludes nothing.

    Yields:
        Ids [c] and their scores [rows, c].
    """
    # the column of each excluded item among all ranked ones, -1 if it is not ranked anyway
    no_ids = choice.items[:0]
    barred_rows, barred_items = (no_ids, no_ids) if barred is None else barred
    column = choice.find_columns(barred_items)
    for start in range(0, len(choice.items), PART):
        items = choice.items[start : start + PART]
        part_scores = scores(items)
        if choice.bonus is not None:
            part_scores = part_scores + choice.bonus[start : start + PART]
        # the excluded items of this part; their columns in it count from its first item
        in_part = (column >= start) & (column < start + len(items))
        part_scores[barred_rows[in_part], column[in_part] - start] = -torch.inf
        yield items, part_scores


def select_best(parts: Parts, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best items of every row, best first; of equal scores, the lower id first.

    A row is a history. Only the best so far are kept, not the scores of all items.

    Args:
        parts: ids [c] and scores [rows, c] of some items at a time, the ids rising from part to
            part, as :func:`score_parts` yields them.
        k: number of items to select.

    Returns:
        Scores [rows, k'] and ids [rows, k'], with k' the smaller of k and the number of items;
        excluded items have the score -inf.
    """
    best = best_items = torch.empty(0)  # the k best so far, and their ids; the first part sets them
    for part_index, (items, scores) in enumerate(parts):
        # the k best of this part, the best first, and of equal scores the first column first
        part_best, column = _select_in_groups(scores, min(k, len(items)))
        if part_index == 0:
            best, best_items = part_best, items[column]
            continue
        # the best so far stand before those of this part, so that of equal ones the lower id wins
        best = torch.cat((best, part_best), 1)
        best_items = torch.cat((best_items, items[column]), 1)
        best, column = _select(best, min(k, best.size(1)))
        best_items = best_items.gather(1, column)
    return best, best_items


def score_and_rank(
    scores: Scores, choice: Choice, ids: Tensor, barred: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the scores of given items for every history, and their ranks among all ranked items.

    ``score_parts`` scores all ranked items, a part at a time, so that the scores of all are never
    held at once. That is done twice: to find the scores of the given items, and to count how many
    items have higher ones.

    Args:
        scores: function of ids [c] that returns the scores [rows, c], a row for each history.
        choice: the items to rank, and what is added to their scores.
        ids: [rows, k] given items of each history. One that is not among the items to rank, such
            as 0, has the score NaN, and its rank means nothing.
        barred: [p] rows and [p] ids of the pairs to exclude, or None.

    Returns:
        Scores [rows, k], and int64 ranks [rows, k]: 1 for the best item, and of two equal scores
        the lower id first.
    """
    column = choice.find_columns(ids)  # of each given item among all ranked ones, or -1
    id_scores = torch.full(ids.shape, torch.nan)

    # First their scores. Each is found in the part that has the item: the column 130 of all is
    # column 30 of a part that starts at 100.
    start = 0
    for items, part_scores in score_parts(scores, choice, barred):
        part_column = column - start
        in_part = (part_column >= 0) & (part_column < len(items))
        # items of other parts get the score of some column of this one, which is not used
        found = part_scores.gather(1, part_column.clamp(0, len(items) - 1))
        id_scores = torch.where(in_part, found, id_scores.to(found))
        start += len(items)

    # then their ranks, one more than the number of items with higher scores, or lower ids if equal
    ranks = torch.ones_like(ids)
    for items, part_scores in score_parts(scores, choice, barred):
        for k in range(ids.size(1)):
            score, item = id_scores[:, k, None], ids[:, k, None]
            # ``part_scores > score``; and all True if ``score`` is NaN, with which every comparison
            # is False: such an item is ranked last and not first
            is_higher = ~(part_scores <= score)
            is_before = is_higher | ((part_scores == score) & (items < item))
            ranks[:, k] += is_before.sum(1)
    return id_scores, ranks


def products(states: Tensor, vectors: Tensor, items: Tensor) -> Tensor:
    """Return the scores of some items: products of states with the items' vectors.

    Args:
        states: [b, d] states.
        vectors: [items, d] vectors of all items.
        items: [c] int64 ids to score, ascending.

    Returns:
        [b, c].
    """
    # without gaps in the ids their vectors are a slice, which is read in place
    start, end = int(items[0]), int(items[-1]) + 1
    if end - start == len(items):
        return states @ vectors[start:end].t()
    # With few gaps all items of the slice are scored, and their scores are selected. That copies b
    # numbers an item, where a selection of vectors copies d, so it pays if b is less than d.
    has_few_gaps = end - start < 2 * len(items)
    b, d = states.shape
    if has_few_gaps and b < d:
        return (states @ vectors[start:end].t())[:, items - start]
    return states @ vectors[items].t()


def _select_in_groups(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k highest scores of every row and their columns, faster on long rows.

    Columns are cut into groups of ``GROUP``: 200 columns are three groups of 64, and 8 remain. The
    k highest scores are in the k groups with the highest maxima, or among the columns that remain,
    so only these are compared.

    Args:
        scores: [rows, columns].
        k: number of scores to select.

    Returns:
        Scores, highest first, and columns, the lower one first of equal scores, [rows, k] each.
    """
    num_groups = scores.size(1) // GROUP
    if num_groups < 4 * k or scores.is_cuda:  # grouping would not pay
        return _select(scores, k)

    end = num_groups * GROUP  # the column behind the last group
    maxima = scores[:, :end].unflatten(1, (num_groups, GROUP)).amax(2)  # [rows, num_groups]
    _, group = _select(maxima, k)

    # the columns of these groups in ascending order, those of group 2 are 128 to 191; then the rest
    first_column = group.sort(1)[0] * GROUP  # of each group, [rows, k]
    column = (first_column[:, :, None] + torch.arange(GROUP)).flatten(1)  # [rows, k * GROUP]
    remainder = torch.arange(end, scores.size(1)).expand(len(scores), -1)
    column = torch.cat((column, remainder), 1)

    value, index = _select(scores.gather(1, column), k)
    return value, column.gather(1, index)


def _select(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k highest scores of every row and their columns; ties in column order.

    Of the scores 5, 7, 5, 5 the two highest are 7, 5 at the columns 1, 0. Torch's ``topk`` may
    return any of the columns 0, 2 and 3 for the 5, and equal scores in any order. This is mended:

    - where the last score that ``topk`` selects is equal to one that it leaves out, the row's
      columns are found again
    - equal scores are sorted by column.

    Args:
        scores: [rows, columns].
        k: number of scores to select.

    Returns:
        Scores, highest first, and int64 columns, [rows, k] each.
    """
    # one more than k, the highest first: so scores that are equal are side by side
    highest, column = scores.topk(min(k + 1, scores.size(1)))
    column = column[:, :k]
    has_ties = (highest[:, 1:] == highest[:, :-1]).any()
    if not has_ties:
        return highest[:, :k], column

    # the rows whose last selected score is equal to the first one left out; not where both are
    # -inf, which stands for excluded items, of which any will do
    if scores.size(1) > k:
        last, left_out = highest[:, k - 1], highest[:, k]
        row = ((left_out == last) & (last > -torch.inf)).nonzero()[:, 0]
        if len(row):
            column[row] = _find_highest(scores[row], last[row, None], k)

    # by column first, so that a stable sort by score keeps equal scores in column order
    column = column.sort(1)[0]
    value, order = scores.gather(1, column).sort(dim=1, descending=True, stable=True)
    return value, column.gather(1, order)


def _find_highest(scores: Tensor, lowest: Tensor, k: int) -> Tensor:
    """Find the columns of the k highest scores of every row; of equal scores, the first columns.

    In the row 5, 7, 5, 5 the lowest of the k = 2 highest scores is 5. One score is above it, so one
    of those equal to it is found as well, the first one: the columns are 0 and 1.

    Args:
        scores: [rows, columns].
        lowest: [rows, 1] the k-th highest score of each row.
        k: number of scores to find.

    Returns:
        [rows, k] int64 columns in ascending order.
    """
    # NaN counts as above, as for ``topk``; with NaN both ``>`` and ``<=`` are False
    is_above = ~(scores <= lowest)
    is_equal = scores == lowest
    num_equal = k - is_above.sum(1, keepdim=True)  # how many of the equal ones to find, [rows, 1]
    # the equal ones are numbered from 1; in the example the numbers are 1, 1, 2, 3
    number = is_equal.cumsum(1, dtype=torch.int32)
    is_found = is_above | (is_equal & (number <= num_equal))
    return is_found.nonzero()[:, 1].view(len(scores), k)
