"""An approximate index of item vectors: the best items of a history without scoring all items.

In: the item vectors of a model whose scores are products with them, and histories of its dataset.
Out: for each history the items with the highest scores, and the share of them that an exact search
would also have found (recall). The index is an inverted file (IVF) of faiss: k-means divides the
items into lists, and of a history only the lists with the best centroids are read.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recbole_pos.config.arguments import IndexArguments
from recbole_pos.errors import UsageError
from recbole_pos.experiment.run import Catalogue
from recbole_pos.files import atomic_write, digest_file
from recbole_pos.layers.large_products import Choice, products
from recbole_pos.serve.explain import BATCH
from recbole_pos.serve.recommender import Recommender
from recbole_pos.serve.scorer import Histories, find_best_items
from recbole_pos.values import shown

FILE = "index.npz"  # in the folder of the run
RECALL_AT = 100  # items of a history by which recall is measured; longer lists are ranked exactly
NUM_SAMPLED = 1_000  # histories on which recall is measured
NUM_ITERATIONS = 10  # of k-means
POINTS_PER_LIST = 40  # item vectors from which k-means learns the centroid of a list
ENOUGH = 0.999  # recall from which no larger number of lists is tried


def use_index(
    trained: Recommender, settings: IndexArguments, data_path: str | Path | None = None
) -> str:
    """Let a model find the items to recommend by an approximate index, and return its facts.

    The index divides the items into lists of near vectors, of which only a few are read for a
    history: the larger the share of the best items that must be found (recall), the more lists. It
    is read from the folder of the run; if that has none, or one of other weights or item vectors,
    the index is built, and saved there.

    Args:
        trained: the model; its ``scorer`` gets the index.
        settings: the name of the index, ``faiss``, and the recall that it must have.
        data_path: the folder that holds the folder of the dataset, if a model that was loaded
            without it has to read the histories of users; by default the run's.

    Returns:
        A sentence with the measured recall.

    Raises:
        UsageError: if the model does not score by products of vectors, an argument is wrong, or
            faiss is not installed.
    """
    name, recall = settings.index, settings.index_recall
    if name != "faiss" or not 0 < recall <= 1:
        raise UsageError(
            "index: expected faiss, and an index_recall above 0 and at most 1; found "
            f"{shown(name)} and {recall}"
        )
    vectors = np.ascontiguousarray(trained.scorer.require_vectors().cpu().numpy())

    # Read the saved index from the run folder (FILE is its name, index.npz). It has a digest (key)
    # of the weights and item vectors that it was made from, so `read_index` returns None for an
    # index of others. A model without a run folder has no saved index.
    file, key = None, ""
    if trained.folder is not None:
        file = trained.folder.path / FILE
        key = digest_file(trained.folder.checkpoint) + hashlib.sha256(vectors.data).hexdigest()
    index = None if file is None else read_index(file, key, vectors)

    # Or build it: divide the items into lists, and measure the recall on histories of users. These
    # need the data, so a model that was loaded without them (it has a Catalogue, the names of items
    # only, in place of a dataset) is loaded again with them.
    if index is None:
        source = trained
        if isinstance(trained.dataset, Catalogue) and trained.folder is not None:
            source = Recommender.load(trained.folder.path, data_path)
        centroids, lists = cluster_items(vectors)
        index = ItemIndex(vectors, centroids, lists)
        index.measure_recall(encode_sample(source), trained.scorer.require_vectors())
        if file is not None:
            index.save(file, key)

    index.choose_probes(recall)  # the fewest lists to read with this measured recall
    trained.scorer.index = index
    return (
        f"index: {index.num_probes:,} of {len(index.centroids):,} lists are read for a history; "
        f"recall@{RECALL_AT} {index.recall:.4f} of exact search, on histories of the dataset"
    )


def import_faiss() -> Any:
    """Return the package faiss; raise a UsageError that says how to install it."""
    try:
        import faiss
    except ImportError:
        raise UsageError("index: faiss is missing; pip install 'recbole-pos[index]'") from None
    faiss.omp_set_num_threads(torch.get_num_threads())  # of this thread; else it takes all cores
    return faiss


def cluster_items(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Divide the items into lists of near vectors by k-means.

    Args:
        vectors: [items + 1, d] float32 item vectors by id; id 0 is padding.

    Returns:
        Centroids of the lists [lists, d], and the list of each item [items], from id 1 on. The
        number of lists is four times the square root of that of items, 4,000 for a million items.
    """
    faiss = import_faiss()
    points = np.ascontiguousarray(vectors[1:])
    num_lists = min(len(points), math.ceil(4 * math.sqrt(len(points))))
    kmeans = faiss.Kmeans(
        points.shape[1],
        num_lists,
        niter=NUM_ITERATIONS,
        max_points_per_centroid=POINTS_PER_LIST,
        min_points_per_centroid=1,  # for small catalogues; it only warns
        seed=0,
    )
    # faiss's k-means; a search for the nearest centroid then gives the list of each item
    kmeans.train(points)
    _, nearest = kmeans.index.search(points, 1)
    return kmeans.centroids, nearest[:, 0]


def encode_sample(source: Recommender) -> torch.Tensor:
    """Return the vectors [n, d] of the histories of random users, the same ones in every call.

    Args:
        source: a model with its dataset, which has the histories.
    """
    # Draw NUM_SAMPLED of the users that the model knows an item of, with a fixed seed.
    dataset = source.dataset
    names = dataset.field2id_token[dataset.uid_field][dataset.log.lengths > 0]
    size = min(NUM_SAMPLED, len(names))
    users = np.random.default_rng(0).choice(names, size, replace=False).tolist()

    # A model that reads the time of the request is asked at the time of the newest interaction.
    sample = source.read_users(users)
    if source.scorer.reads_request:
        sample = sample.with_request_time(sample.newest)

    # Encode some of the histories (BATCH) at a time; ``rows`` are the numbers of those in a batch.
    with torch.inference_mode():
        rows = torch.arange(size).split(BATCH)
        return torch.cat([source.scorer.encode(sample.select(x.numpy())) for x in rows])


def read_index(file: Path, key: str, vectors: np.ndarray) -> ItemIndex | None:
    """Return the index in a file; None if there is no such file, or one of another model.

    numpy reads it, which runs no code from the file, and the vectors come from the model.

    Args:
        file: what :meth:`ItemIndex.save` has written.
        key: digest of the weights and item vectors of the model.
        vectors: [items + 1, d] float32 item vectors by id.
    """
    if not file.is_file():
        return None
    with np.load(file) as saved:
        lists, centroids = saved["lists"], saved["centroids"]
        # faiss, which is written in C++, does not check the numbers of lists.
        is_within_bounds = 0 <= lists.min() and lists.max() < len(centroids)
        if str(saved["key"]) != key or not is_within_bounds:
            return None
        index = ItemIndex(vectors, centroids, lists)
        index.probes, index.recalls = saved["probes"], saved["recalls"]  # as they were measured
    return index


class ItemIndex:
    """Item vectors in lists, of which only the most promising ones are read for a history.

    Attributes:
        centroids: [lists, d] float32 mean vector of each list.
        lists: [items] number of the list of each item, from id 1 on.
        num_items: number of items.
        probes: numbers of lists that were tried, ascending; the last is that of all lists.
        recalls: recall with each of ``probes``; the last is 1.
        num_probes: number of lists to read for a history.
        recall: recall with this number.
    """

    def __init__(self, vectors: np.ndarray, centroids: np.ndarray, lists: np.ndarray) -> None:
        """Put the items into the lists that k-means has found for them.

        Args:
            vectors: [items + 1, d] float32 item vectors by id; faiss copies them.
            centroids: [lists, d] mean vector of each list.
            lists: [items] number of the list of each item, from id 1 on.
        """
        faiss = import_faiss()
        self.centroids = np.ascontiguousarray(centroids, np.float32)
        self.lists = lists.astype(np.int64)
        self.num_items = len(lists)

        # Until `measure_recall` and `choose_probes` are called, a history reads all lists, by which
        # all of its best items are found.
        num_lists, d = self.centroids.shape
        self.num_probes, self.recall = num_lists, 1.0
        self.probes, self.recalls = np.array([num_lists]), np.ones(1)

        # An empty index of faiss, with lists that k-means has found already (is_trained). By the
        # quantizer, a history reads the lists whose centroids have the largest products with it.
        self._quantizer = faiss.IndexFlatIP(d)
        self._quantizer.add(self.centroids)
        metric = faiss.METRIC_INNER_PRODUCT
        self._faiss_index = faiss.IndexIVFFlat(self._quantizer, d, num_lists, metric)
        self._faiss_index.is_trained = True

        # Put each item into its list. faiss's ``add`` would search for the list; ``add_core`` takes
        # it as given. It is a function of C++, which gets arrays by their addresses (swig_ptr).
        items, ids = np.ascontiguousarray(vectors[1:]), np.arange(1, len(vectors))
        self._faiss_index.add_core(
            len(items), faiss.swig_ptr(items), faiss.swig_ptr(ids), faiss.swig_ptr(self.lists)
        )

    def save(self, file: Path, key: str) -> None:
        """Write the lists and the measured recall, without the vectors, complete or not at all.

        Args:
            file: the file to write.
            key: digest of the weights and item vectors of the model.
        """
        with atomic_write(file, text=False) as unfinished:
            np.savez(
                unfinished,
                key=key,
                centroids=self.centroids,
                lists=self.lists.astype(np.int32),
                probes=self.probes,
                recalls=self.recalls,
            )

    def measure_recall(self, states: torch.Tensor, vectors: torch.Tensor) -> None:
        """Measure the recall of the index for several numbers of lists that a history reads.

        The index divides the items into lists. Recall is the share of the k best items of a history
        that are found if it reads only so many of the lists, on average over n histories. The
        numbers of lists are kept in ``probes``, and the recall with each in ``recalls``.

        Args:
            states: [n, d] vectors of histories.
            vectors: [items + 1, d] item vectors by id; id 0 is padding.
        """
        num_items, num_lists = self.num_items, len(self.centroids)  # a centroid for each list

        # The k best items of each history [n, k], by an exact search over all items.
        k = min(RECALL_AT, num_items)
        every = Choice(items=torch.arange(1, num_items + 1))
        with torch.inference_mode():
            _, best = find_best_items(lambda ids: products(states, vectors, ids).cpu(), every, k)
        queries = states.cpu().numpy()

        # Try numbers of lists. A list has num_items / num_lists items on average, so the first
        # number is that of lists with 2 * k items in all. It is doubled until nearly all of the
        # best items are found (a recall of ENOUGH), or all lists are read.
        probes: list[int] = []
        recalls: list[float] = []
        num_probes = math.ceil(2 * k * num_lists / num_items)
        while num_probes < num_lists and (not recalls or recalls[-1] < ENOUGH):
            _, items = self._search(queries, k, num_probes)
            num_found = 0
            for best_of_history, found in zip(best, items, strict=True):
                num_found += np.count_nonzero(np.isin(best_of_history, found))
            probes.append(num_probes)
            recalls.append(num_found / best.size)
            num_probes *= 2

        # With all lists the search is exact, so its recall need not be measured.
        self.probes = np.array([*probes, num_lists])
        self.recalls = np.array([*recalls, 1.0])

    def choose_probes(self, recall: float) -> None:
        """Set how many of the lists of items a history reads, by the recall that is asked for.

        The index divides the items into lists of near ones. ``probes`` are the numbers of lists
        that were tried, ascending, and ``recalls`` the measured recall with each of them. The last
        number is that of all lists, whose recall is 1. For example, with probes [5, 10, 40] and
        recalls [0.8, 0.97, 1], a recall of 0.9 needs 10 lists.

        Args:
            recall: least share of the best items to be found, above 0 and at most 1. For 1 all
                lists are read: fewer may have found every best item of the histories that were
                measured, but need not do so for others.
        """
        # The index of a number in ``probes``: of the first that is enough (argmax of a mask finds
        # the first True), or of the last.
        chosen = (self.recalls >= recall).argmax() if recall < 1 else len(self.recalls) - 1
        self.num_probes, self.recall = int(self.probes[chosen]), float(self.recalls[chosen])

    def can_rank(self, histories: Histories, k: int, choice: Choice) -> bool:
        """Return whether the index may be used for a request; else all items are scored exactly.

        It may if the request is like those on which its recall was measured: up to RECALL_AT items
        for each history, without boosts, and without a list of allowed items that a history has for
        itself. At least half of all items must be allowed: scoring fewer takes less time than the
        index.

        Args:
            histories: the histories.
            k: number of items for each.
            choice: the items that may be recommended, and their boosts (``bonus``).
        """
        is_like_measured = k <= RECALL_AT and choice.bonus is None and histories.allowed is None
        return is_like_measured and len(choice.items) >= self.num_items / 2

    def find_best(
        self,
        states: torch.Tensor,
        k: int,
        choice: Choice,
        barred: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the k items with the highest scores for each of b histories, best first.

        The index divides all items into lists of near ones. Only the ``num_probes`` lists that are
        nearest to the vector of a history are searched, so a few of the best items may be missed.

        Args:
            states: [b, d] vectors of the histories.
            k: number of items for each history; all of ``choice`` if it has fewer.
            choice: ids of the items that may be recommended.
            barred: index of the history [p] and item id [p] of pairs that are not recommended.

        Returns:
            Scores and item ids, both [b, k]; the score is -inf where no further item is left.
        """
        # If only some items are allowed, a list has fewer of them, so more lists are searched. With
        # 600 of 900 items allowed, 15 lists have about as many of these as 10 lists have of all.
        is_allowed, num_probes = None, self.num_probes
        num_allowed = len(choice.items)
        if num_allowed < self.num_items:
            is_allowed = np.zeros(self.num_items + 1, dtype=bool)  # by id; 0 is padding
            is_allowed[choice.items.numpy()] = True
            num_probes = math.ceil(num_probes * self.num_items / num_allowed)

        # Some of the items that are found may be barred. So find more than k for each history: k
        # and as many as the history with the most barred items has of these.
        barred_rows, barred_items = (column.numpy() for column in barred)
        most_barred = int(np.bincount(barred_rows, minlength=1).max())
        num_found = min(k + most_barred, num_allowed)
        scores, items = self._search(states.cpu().numpy(), num_found, num_probes, is_allowed)

        # Barred items get the score -inf. Then sort by score, highest first, and equal scores by
        # item id; keep k.
        is_barred = _contains_pairs(items, barred_rows, barred_items, num_ids=self.num_items + 1)
        scores[is_barred] = -np.inf
        order = np.lexsort((items, -scores))[:, :k]
        return np.take_along_axis(scores, order, 1), np.take_along_axis(items, order, 1)

    def _search(
        self,
        queries: np.ndarray,
        number: int,
        num_probes: int,
        is_allowed: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the best items that some of the lists hold, for each of b vectors.

        A vector whose lists hold too few items is compared with those of all lists.

        Args:
            queries: [b, d] float32 vectors.
            number: number of items to find for each; at most that of allowed items.
            num_probes: number of lists to read for each.
            is_allowed: [items + 1] whether each item, by id, may be found; None for all.

        Returns:
            Exact products, highest first, and ids of the items, both [b, number]. A vector with
            NaN has no products: they are NaN, which is an error for those who rank them.
        """
        # A selector lets faiss find the allowed items only; it has one bit for each id.
        faiss = import_faiss()
        selector = None
        if is_allowed is not None:
            selector = faiss.IDSelectorBitmap(np.packbits(is_allowed, bitorder="little"))

        def search(vectors: np.ndarray, nprobe: int) -> tuple[np.ndarray, np.ndarray]:
            settings = faiss.SearchParametersIVF(nprobe=nprobe, sel=selector)
            return self._faiss_index.search(vectors, number, params=settings)

        scores, items = search(queries, num_probes)
        found_too_few = items[:, -1] < 0  # faiss gives the id -1 where no item was left
        if found_too_few.any():
            all_lists = len(self.centroids)
            scores[found_too_few], items[found_too_few] = search(queries[found_too_few], all_lists)
        scores[items < 0] = np.nan
        return scores, items


def _contains_pairs(
    table: np.ndarray, rows: np.ndarray, items: np.ndarray, num_ids: int
) -> np.ndarray:
    """Return which entries of a table of item ids are among p given pairs of a row and an item.

    For the table [[5, 7], [5, 8]] and the pairs (0, 7) and (1, 5) it is [[no, yes], [yes, no]].

    Args:
        table: [b, k] item ids.
        rows: [p] row of each pair.
        items: [p] item id of each pair.
        num_ids: number of all item ids, the padding included.
    """
    # To compare pairs, make one number of each: row * num_ids + id, which differs for all pairs.
    numbers = np.arange(len(table))[:, None] * num_ids + table
    return np.isin(numbers, rows * num_ids + items)
