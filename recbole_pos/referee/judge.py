"""Where the right answers stand in lists of recommended items.

In: :class:`Predictions` and the :class:`Requests` that they answer. Out: the rank of every target,
and counts of all that is wrong with the lists. A list is judged as it stands, as its user would see
it: an item that is unknown, excluded or repeated keeps its place and cannot be a hit.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recbole_pos.errors import UsageError
from recbole_pos.referee.predictions import Predictions
from recbole_pos.referee.split import PROTOCOL_FILE, Requests, count_within, divide
from recbole_pos.values import listed, shown

_BLOCK_ROWS = 1 << 23  # rows of lists that are sorted at a time, in about 1.2 GB
_LARGEST_SHARE = 0.01  # of rows or requests with a fault; above it is a warning
# Kinds of faults, in the words of the messages: "3 of 900 rows of unknown items".
UNKNOWN_REQUESTS = "rows of unknown requests"
UNKNOWN_ITEMS = "rows of unknown items"
DUPLICATES = "rows that repeat an item"
SEEN_ITEMS = "rows of seen items, which are excluded"
MISSING = "requests without a list"
SHORT = "requests with a short list"
# Kind of fault -> what follows from it.
_EFFECTS = {
    UNKNOWN_REQUESTS: "they are not read",
    UNKNOWN_ITEMS: "they keep their places and are no hits",
    DUPLICATES: "they keep their places, and the first counts",
    SEEN_ITEMS: "they keep their places and are no hits",
    MISSING: "they are misses",
    SHORT: "what the list lacks is a miss",
}


@dataclass(frozen=True)
class Judgement:
    """What a file of predictions is worth.

    Attributes:
        name: name of the predictions.
        requests: the requests that they answer.
        ranks: [requests] int64 rank of each target in its list, 0 for the first; the number of all
            items for a target that is not in the list.
        length: items in the longest list, K. Nothing is known of places beyond.
        num_rows: rows of the predictions.
        counts: fault -> number of rows or requests with it; each row counts for one fault at most.
    """

    name: str
    requests: Requests
    ranks: np.ndarray
    length: int
    num_rows: int
    counts: dict[str, int]

    def list_faults(self, min_share: float = 0.0) -> list[str]:
        """Return a sentence for each kind of fault that is frequent enough.

        A sentence says how often the fault occurs, and what follows from it (_EFFECTS), such as
        ``a.csv: 12 of 500 requests without a list; they are misses``.

        Args:
            min_share: a fault is left out if its share is not above this. Missing and short lists
                are counted among the requests, all other faults among the rows of the file.
        """
        sentences = []
        for fault, count in self.counts.items():
            is_of_whole_lists = fault in (MISSING, SHORT)
            total = len(self.ranks) if is_of_whole_lists else self.num_rows
            if count > min_share * total:
                sentences.append(f"{self.name}: {count:,} of {total:,} {fault}; {_EFFECTS[fault]}")
        return sentences

    @property
    def warnings(self) -> list[str]:
        """A sentence for each fault of more than 1% of the rows or requests."""
        return self.list_faults(_LARGEST_SHARE)


def judge(predictions: Predictions, requests: Requests) -> Judgement:
    """Find at which place of each recommended list the right answer stands, and count faults.

    A request asks for one held-out item, the target; a list of items answers it. Of equal scores in
    a list, the item with the lower id is first, as in evaluations of this package; ids are in the
    order in which items first appear in the dataset.

    Args:
        predictions: the lists, whose rows (request, item, score or rank) are read from a file in
            blocks.
        requests: the requests with their targets.

    Returns:
        The rank of each target, and how many rows or lists have each fault.

    Raises:
        UsageError: if the predictions were made for another split, or name no request.
    """
    _require_same_split(predictions, requests)

    # Read all rows once, to count how many each list has, and how many belong to no request.
    lengths, num_unknown, example = _count_lists(predictions, requests)
    if not lengths.any():
        found = f"it has names such as {shown(example)}" if example else "it has no row"
        raise UsageError(
            f"{predictions.name} answers no request: {found}, and the requests are "
            f"{listed(requests.names[:2])}, ... (`recbole-pos split` writes them)"
        )
    # All lists should have as many items as the longest one: metrics read that many of each.
    longest = int(lengths.max())
    counts = Counter(
        {
            UNKNOWN_REQUESTS: num_unknown,
            MISSING: int((lengths == 0).sum()),
            SHORT: int(((lengths > 0) & (lengths < longest)).sum()),
        }
    )

    # Read them again for some requests at a time, whose lists have about _BLOCK_ROWS rows together
    # and fit into memory: ``divide`` yields ranges of requests.
    ranks = np.empty(len(requests), dtype=np.int64)
    for chosen in divide(lengths, _BLOCK_ROWS):
        ranks[chosen], faults = _judge_block(predictions, requests, chosen)
        counts += faults  # adds up the counts of each kind of fault

    # the faults that occur, in the order of _EFFECTS, which has all kinds of faults
    num_rows = int(lengths.sum()) + num_unknown
    found_faults = {fault: counts[fault] for fault in _EFFECTS if counts[fault]}
    return Judgement(predictions.name, requests, ranks, longest, num_rows, found_faults)


def _require_same_split(predictions: Predictions, requests: Requests) -> None:
    """Raise a UsageError if predictions were made for another split of the data than the requests.

    The digest of a split is a hash of its requests and targets. Predictions may have it in a column
    ``split``; otherwise it is looked up in the folder that ``recbole-pos split`` has written, if
    the file lies there. Without any digest, nothing is refused.

    Args:
        predictions: the lists to be judged.
        requests: the requests of the split at hand.
    """
    # The digest is in the column, or in the description of the split that lies beside the lists
    # (PROTOCOL_FILE, which has a mapping for each part, test or valid). Predictions of a frame have
    # no file, and so no neighbour.
    digest = predictions.read_split_digest()
    protocol_file = Path(predictions.name).parent / PROTOCOL_FILE
    if digest is None and Path(predictions.name).is_file() and protocol_file.is_file():
        protocol: dict[str, Any] = json.loads(protocol_file.read_bytes())
        digest = protocol.get(requests.part, {}).get("digest")
    if digest not in (None, requests.digest):
        raise UsageError(
            f"{predictions.name} was made for another split: its digest is {digest}, and that of "
            f"these {requests.part} requests {requests.digest}; give the same data and options as "
            "to `recbole-pos split`, or make the predictions again"
        )


def _count_lists(
    predictions: Predictions, requests: Requests
) -> tuple[np.ndarray, int, str | None]:
    """Count the rows that each request has in predictions, which are read once, in blocks.

    Args:
        predictions: rows of a request and an item, as some system has written them.
        requests: the requests of the split, with their names.

    Returns:
        [requests] int64 length of each request's list, 0 if it has none.
        How many rows name a request that does not exist.
        The first such name; None if there is none.
    """
    names = pa.array(requests.names)
    lengths = np.zeros(len(requests), dtype=np.int64)
    num_unknown, example = 0, None
    for rows in predictions.read_rows():
        # for each row the place of its request among ``names``, -1 for an unknown name
        index = _find_index(rows.requests, names)
        is_unknown = index < 0
        # bincount counts how often each index occurs, here the rows of each request.
        lengths += np.bincount(index[~is_unknown], minlength=len(lengths))
        num_unknown += int(is_unknown.sum())
        if example is None and is_unknown.any():
            example = rows.requests[int(is_unknown.argmax())].as_py()
    return lengths, num_unknown, example


def _find_index(column: pa.Array, names: pa.Array) -> np.ndarray:
    """Return [n] int32 index of each text of a column in ``names``, -1 for one not in it."""
    return pc.fill_null(pc.index_in(column, value_set=names), -1).to_numpy()


def _judge_block(
    predictions: Predictions, requests: Requests, chosen: slice
) -> tuple[np.ndarray, Counter[str]]:
    """Find the ranks of the targets of some requests, and count faults in their lists.

    Args:
        predictions: all lists; only those of the chosen requests are kept in memory.
        requests: all requests, each with a target, the item that is the right answer.
        chosen: the requests to judge.

    Returns:
        [chosen requests] int64 rank of each target, 0 for the first place; the number of all items
        for a target that its list lacks.
        Kind of fault -> number of rows with it.
    """
    # Sort the rows of the lists by request, then by their order in the list, then by item id.
    request, item, order = _read_block(predictions, requests, chosen)
    by_place = np.lexsort((item, order, request))
    request, item = request[by_place], item[by_place]

    # A row without a fault that has the target of its request is a hit.
    faults = _find_faults(request, item, requests, chosen)
    has_fault = np.logical_or.reduce(list(faults.values()))
    targets = requests.target_ids[chosen]
    is_hit = (item == targets[request]) & ~has_fault

    # The rank of the target is the place of its hit. ``count_within`` gives the places 0, 1, ... in
    # each list; a faulty row has a place, too, so the items after it do not move up.
    place = count_within(request)
    ranks = np.full(len(targets), len(requests.item_names))  # the rank of a target without a hit
    ranks[request[is_hit]] = place[is_hit]
    return ranks, Counter({fault: int(is_faulty.sum()) for fault, is_faulty in faults.items()})


def _find_faults(
    request: np.ndarray, item: np.ndarray, requests: Requests, chosen: slice
) -> dict[str, np.ndarray]:
    """Return which rows of some lists have which fault; each row has one fault at most.

    Args:
        request: [rows] number of each row's request, counted from the first chosen one; ascending.
        item: [rows] id of each row's item; the number of all items for an unknown one.
        requests: all requests.
        chosen: the requests whose lists these are.

    Returns:
        Kind of fault -> [rows] bool.
    """
    # Make one number of each pair of a request and an item, by which pairs are compared. As ids go
    # from 0 to ``num_items`` (an unknown item), request 2 and item 5 are 2 * (num_items + 1) + 5.
    num_items = len(requests.item_names)
    pair = request.astype(np.int64) * (num_items + 1) + item

    # A row whose pair an earlier row has repeats an item. np.unique finds the first row of each.
    _, first_rows = np.unique(pair, return_index=True)
    is_first = np.zeros(len(pair), dtype=bool)
    is_first[first_rows] = True
    is_unknown = item == num_items
    is_repeated = ~is_first & ~is_unknown

    # The pairs that no list should have, since the user has had the item before.
    excluded_request, excluded_item = requests.find_excluded(chosen)
    excluded_pair = excluded_request * (num_items + 1) + excluded_item
    is_excluded = np.isin(pair, excluded_pair) & ~is_repeated
    return {UNKNOWN_ITEMS: is_unknown, DUPLICATES: is_repeated, SEEN_ITEMS: is_excluded}


def _read_block(
    predictions: Predictions, requests: Requests, chosen: slice
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows of some requests, in the order of the file, with numbers in place of names.

    A row of predictions is one recommended item: request, item, and order in the request's list.

    Args:
        predictions: all rows, which are read in blocks.
        requests: all requests, with their names, and the names of items by id.
        chosen: the requests whose rows are kept.

    Returns:
        request: [rows] int32 number of the request, counted from the first chosen one.
        item: [rows] int32 id of the item, from 1; for an item that the dataset does not have, the
            first number that is no id.
        order: [rows] float64 order in the list.
    """
    request_names = pa.array(requests.names[chosen])
    item_names = pa.array(requests.item_names[1:])  # without id 0, which is padding
    unknown_item = np.int32(len(requests.item_names))
    blocks = []
    for rows in predictions.read_rows():
        # Find the number of each row's request, -1 if it is not a chosen one.
        request = _find_index(rows.requests, request_names)
        is_chosen = request >= 0

        # Find the items of the rows that are kept. The first name has the id 1, hence + 1.
        index = _find_index(rows.items.filter(pa.array(is_chosen)), item_names)
        item = np.where(index >= 0, index + 1, unknown_item)
        blocks.append((request[is_chosen], item, rows.order[is_chosen]))

    # Join the blocks, three arrays each.
    request, item, order = map(np.concatenate, zip(*blocks, strict=True))
    return request, item, order
