"""Learned functions of the time between interactions: tables over buckets or counts, and decays.

Buckets grow geometrically, by e^0.301 = 1.35, from one second on, as in HSTU's public code. Shapes
as in ``layers/sequence_batch.py``.

References:
    Yufei Ye et al. "FuXi-beta: Towards a Lightweight and Fast Large-Scale Generative
    Recommendation Model." 2025 (arXiv 2508.10615): a power of the time instead of buckets.
    Dezhi Yi et al. "FuXi-gamma: Efficient Sequential Recommendation with Exponential-Power
    Temporal Encoder and Diagonal-Sparse Positional Mechanism." 2025 (arXiv 2512.12740).
    Jiacheng Li, Yujie Wang, Julian McAuley. "Time Interval Aware Self-Attention for Sequential
    Recommendation." WSDM 2020 (a baseline of AttrFormer's Table 6).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recbole_pos.layers.attention import Dropout, future_mask
from recbole_pos.layers.hooks import AttentionPosition, Dimensions, InputPosition
from recbole_pos.layers.large_products import iterate_chunks
from recbole_pos.layers.sequence_batch import SequenceBatch
from recbole_pos.position.additive import make_table
from recbole_pos.position.kernel import toeplitz_matrix
from recbole_pos.values import SECONDS

# ln of the growth from bucket to bucket: HSTU's number, which is about log10(2)
WIDTH = 0.301
LANES = 32  # copies of a table, which keys read in turn, see ``find_entries``
SHORTEST = 1e-9  # seconds, in place of 0, which has no logarithm


def find_bucket(seconds: Tensor, num_buckets: int) -> Tensor:
    """Return the number of the bucket that each span of time falls into, as HSTU counts them.

    It is min(floor(ln(max(1, seconds)) / 0.301), num_buckets - 1): buckets grow by a factor of
    1.35. The first takes spans below 1.35 s, also negative ones, and the last all longer ones.

    Args:
        seconds: float64 spans of any shape.
        num_buckets: number of buckets.

    Returns:
        int32 of the same shape.
    """
    # WIDTH is the 0.301 of the formula
    return seconds.clamp(min=1).log_().div_(WIDTH).clamp_(max=num_buckets - 1).to(torch.int32)


class TimeEmbedding(InputPosition):
    """Learned absolute times in buckets, x + P[bucket] (Wei et al., TO-RoPE, Table 4: time APE).

    Times count from older interactions, never from the newest one of the window: in training every
    interaction is a query, and seconds until the newest one would reveal when later interactions
    happen. With ``request_time: target`` R[bucket(t_{k+1} - t_k)] is added to interaction k, for
    the gap to the request that its state answers.

    Args:
        time_buckets: rows of P; the last one takes everything that is longer.
        time_from: ``first`` takes the seconds since the first interaction of the window,
            ``previous`` those since the interaction before (0 for the first).
    """

    options = ("time_buckets", "time_from")
    needs_time = True
    reads_request = True

    def __init__(self, dimensions: Dimensions, *, time_buckets: int, time_from: str) -> None:
        """Create the learned tables, whose rows :meth:`forward` adds to item vectors.

        P has a vector for how long after an older interaction an interaction takes place. R has one
        for how long after it the next item is requested; R exists only if the dataset has times of
        requests. Both have a row for each bucket, a range of seconds.

        Args:
            dimensions: sizes of the model, and whether requests have times.
            time_buckets: number of buckets, the rows of each table.
            time_from: the older interaction: ``first`` for the oldest one of the history,
                ``previous`` for the one before.
        """
        super().__init__()
        self.time_from = time_from
        d = dimensions.hidden_size
        self.weight = make_table(dimensions, time_buckets, d)  # P
        self.request = make_table(dimensions, time_buckets, d) if dimensions.request_time else None

    def forward(self, x: Tensor, batch: SequenceBatch) -> Tensor:
        """Return x + P[bucket(t)] and, where requests have times, + R[bucket(gap)].

        t are the seconds since the first interaction of the history, or since the interaction
        before (``time_from``). gap is the time from an interaction to the request after it.

        Args:
            x: [m, d] item vectors.
            batch: the histories, with times.

        Returns:
            [m, d].
        """
        seconds = batch.elapsed  # since the first interaction of each history
        if self.time_from == "previous":  # since the one before; 0 for the first
            seconds = seconds.diff(prepend=seconds[:1]).masked_fill(batch.index == 0, 0)
        x = x + F.embedding(find_bucket(seconds, len(self.weight)), self.weight)
        if self.request is None:  # the table R exists only if requests have times
            return x
        gap = batch.request.elapsed - batch.elapsed
        return x + F.embedding(find_bucket(gap, len(self.request)), self.request)


class RequestAge(InputPosition):
    """Learned vector for the time from an interaction to the request, x_j + T[bucket(t - t_j)].

    t is the time of the newest interaction or, with ``request_time: target``, of the request after
    it. This is the time part of HSTU's published input (Meta's generative-recommenders,
    ``HSTUPositionalEncoder``); its positions from the end are the scheme ``learned``. A bucket is
    floor(f(minutes)), where f is the square root or the natural logarithm, and at least 0.

    All interactions read t, which tells the states of earlier ones when the newest one comes. So a
    model must learn from one target for each window: ``train_windows: prefix``.

    Args:
        age_buckets: rows of T; the last one takes everything that is longer.
        age_scale: f, ``sqrt`` or ``log``.
    """

    options = ("age_buckets", "age_scale")
    needs_time = True
    reads_request = True
    reads_newest_time = True

    def __init__(self, dimensions: Dimensions, *, age_buckets: int, age_scale: str) -> None:
        """Create the learned table T, with a vector for each bucket of times.

        Args:
            dimensions: sizes of the model.
            age_buckets: number of buckets, the rows of T.
            age_scale: ``log`` or ``sqrt``, the function of minutes whose whole part is the bucket.
        """
        super().__init__()
        self.is_log = age_scale == "log"
        self.weight = make_table(dimensions, age_buckets, dimensions.hidden_size)

    def forward(self, x: Tensor, batch: SequenceBatch) -> Tensor:
        """Add to item vectors a learned vector for the time from each interaction to the request.

        The request is the moment at which the next item after the history is asked for or, where
        that is not known, the time of the newest interaction. The vector is a row of ``weight``:
        row floor(ln(minutes)) if ``is_log``, else floor(sqrt(minutes)); 0 at least.

        Args:
            x: [m, d] item vectors.
            batch: the histories, with times.

        Returns:
            [m, d].
        """
        # ``last`` [b] are the indices of the histories' newest interactions among all m, and
        # ``row`` [m] is the number of the history of each interaction.
        request_time = batch.request.elapsed[batch.last]  # seconds, of each history, [b]
        seconds = request_time[batch.row] - batch.elapsed  # from each interaction to it, [m]
        minutes = seconds.clamp(min=1e-6) / 60
        bucket = minutes.log() if self.is_log else minutes.sqrt()
        return x + F.embedding(bucket.clamp(0, len(self.weight) - 1).long(), self.weight)


class HSTUBias(AttentionPosition):
    """Learned bias of distance and bucketed time (HSTU, Zhai et al. 2024).

    B_ij = w_pos[i - j] + w_time[bucket(t_i - t_j)], one table each per layer, the same for its
    heads, as RelativeBucketedTimeAndPositionBasedBias of the authors' code. Differences to it:

    - The time of query i is t_i; with ``request_time: target`` it is t_{i+1}, as in the code.
    - Tables start at zero, so a fresh model equals its backbone; the code's are normal(0, 0.02).
    - ``hstu_time_buckets`` counts all buckets (the code's 128 makes 129), and w_pos has no entries
      for the future, which the mask hides.

    Args:
        hstu_time_buckets: entries of w_time; the last one takes everything that is longer.
    """

    options = ("hstu_time_buckets",)
    needs_time = True
    reads_request = True

    def __init__(self, dimensions: Dimensions, *, hstu_time_buckets: int) -> None:
        """Create the learned numbers w_pos of each distance and w_time of each bucket, at first 0.

        Args:
            dimensions: sizes of the model; distances are below its ``max_length``.
            hstu_time_buckets: number of buckets, ranges of the time between two interactions.
        """
        super().__init__()
        self.distance = nn.Parameter(torch.zeros(dimensions.max_length))
        self.time = nn.Parameter(torch.zeros(hstu_time_buckets))

    def bias(self, q: Tensor, k: Tensor, batch: SequenceBatch) -> Tensor:
        """Return w_pos[i - j] + w_time[bucket(t_i - t_j)] of query i and key j, [b, 1, t, t]."""
        by_time = look_up_intervals(self.time, batch)  # [b, t, t]
        by_distance = toeplitz_matrix(self.distance, batch.width)  # [t, t]
        return (by_time + by_distance).unsqueeze(1).to(q.dtype)


def map_spans(
    batch: SequenceBatch, function: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> Tensor:
    """Apply an elementwise function to the seconds t_i - t_j of all pairs of interactions.

    t_i is the time at which query i is asked: the time of interaction i or, where requests have
    times, of the request for the next one. Few histories are computed at a time, since differences
    of all would take much memory in float64.

    Args:
        batch: the histories.
        function: takes float64 seconds, and may overwrite them.
        dtype: type of the result.

    Returns:
        [b, t, t] from query i (row) to key j, padded after shorter histories. Entries of newer keys
        and of padding have no meaning.
    """
    query_times, key_times = pad_times(batch)
    b, t = key_times.shape
    out = torch.empty(b, t, t, dtype=dtype, device=key_times.device)
    # iterate_chunks yields slices of the b histories, of t^2 numbers each, that fit into memory
    # together
    for histories in iterate_chunks(b, t**2, key_times.device):
        spans = query_times[histories, :, None] - key_times[histories, None]  # [some of b, t, t]
        out[histories] = function(spans)
    return out


def pad_times(batch: SequenceBatch) -> tuple[Tensor, Tensor]:
    """Return the times of the queries and of the keys of attention, as padded blocks.

    The time of a key is that of its interaction. So is the time of a query, unless the dataset has
    times of requests. Then it is the time at which the item after the interaction is requested.

    Args:
        batch: the m interactions of b histories.

    Returns:
        Seconds since the oldest interaction of each history, [b, t] each, padded after shorter
        histories.
    """
    # ``elapsed`` [m] counts these seconds. ``request`` is the batch with the times of requests, or
    # the batch itself if the dataset has none.
    query_times = batch.pad(batch.request.elapsed, "start")
    key_times = batch.pad(batch.elapsed, "start")
    return query_times, key_times


def look_up_intervals(table: Tensor, batch: SequenceBatch) -> Tensor:
    """Return table[bucket(t_i - t_j)] for each two interactions i and j of a history.

    A bucket is a range of times, such as 60 to 81 seconds, for which the table has one number.

    The numbers are read from copies of the table, one behind the other: of ``LANES`` copies, pair
    i, j reads copy j % LANES, and in it the entry of its bucket. The result is the same, but faster
    to train on a GPU. There the gradients of all pairs that read one entry are added one after the
    other, and most pairs fall into few buckets.

    Args:
        table: [num_buckets] learned number of each bucket; the last one is for everything longer.
        batch: the histories, with times; t is the length of the longest.

    Returns:
        [b, t, t] from query i (row) to key j, padded after shorter histories.
    """
    num_buckets = len(table)
    copies = table.repeat(LANES)  # [LANES * num_buckets]

    # (j % LANES) * num_buckets + bucket of each pair, [b, t, t]. These entries do not depend on the
    # numbers in the table, so they are computed once for all layers.
    cache_key = ("intervals", num_buckets)
    entries = batch.cached(cache_key, lambda: find_entries(batch, num_buckets, table.device))
    return copies.index_select(0, entries.flatten()).view(entries.shape)  # copies[entries]


def find_entries(batch: SequenceBatch, num_buckets: int, device: torch.device) -> Tensor:
    """Find the entry that each pair of interactions reads in a table that is repeated.

    The table has a number for each bucket, a range of the time t_i - t_j between query i and key j.
    It is repeated ``LANES`` times, and key j reads copy j modulo LANES: adding up the gradients of
    all pairs in one place would be slow on a GPU. With 128 buckets, a pair in bucket 5 with key
    j = 2 reads entry 2 * 128 + 5 = 261.

    Args:
        batch: the histories, with times.
        num_buckets: number of buckets.
        device: device of the result.

    Returns:
        [b, t, t] int32 from query i (row) to key j (column), padded after shorter histories.
    """
    keys = torch.arange(batch.width, dtype=torch.int32, device=device)
    copy_start = keys % LANES * num_buckets  # [t], the first entry of the copy that key j reads

    def find(seconds: Tensor) -> Tensor:  # t_i - t_j of some of the histories, [some of b, t, t]
        return find_bucket(seconds, num_buckets).add_(copy_start)

    return map_spans(batch, find, torch.int32)  # for all histories


class TimeDecay(AttentionPosition):
    """Learned functions of the time between interactions, one for each head.

    With d = max(t_i - t_j, 1 ns) for query i and key j, and a, s > 0, b > 0 learned for each head:

        exponential_power:  B_ij = a 2^(-(d / s)^b)       (FuXi-gamma: a g^(d^b), g = 2^(-1 / s^b))
        power:              B_ij = a (1 + d / s)^(-b)     (FuXi-beta: a (1 + d)^(-b))

    Fresh b are 1, so that half of a is left at d = s; fresh s are log-spaced over the heads. Fresh
    a are 0, so that a fresh model equals its backbone. Differences to FuXi: the term is added to
    the logits of content, not in a channel of its own; there is s; each head has its own numbers.

    Args:
        decay_kind: ``exponential_power`` or ``power``.
        decay_shortest, decay_longest: s of the first and the last head, in ``time_unit``.
        time_unit: unit of both.
    """

    options = ("decay_kind", "decay_shortest", "decay_longest", "time_unit")
    needs_time = True
    reads_request = True

    def __init__(
        self,
        dimensions: Dimensions,
        *,
        decay_kind: str,
        decay_shortest: float,
        decay_longest: float,
        time_unit: str,
    ) -> None:
        """Create the parameters of a function of the time d between two interactions.

            exponential_power:  a 2^(-(d / s)^b)          power:  a (1 + d / s)^(-b)

        It is added to the logits of attention. Each of the h heads has its own strength a, reach s
        and power b. The strength is 0 when fresh, so that nothing is added; the power is 1, so that
        half of a is left at d = s. Fresh reaches are log-spaced from the first head to the last: 1,
        10 and 100 days for 3 heads from 1 to 100. A single head has their geometric mean, 10.

        Args:
            dimensions: sizes of the model, with h heads.
            decay_kind: the function, ``exponential_power`` or ``power``.
            decay_shortest, decay_longest: fresh reach of the first and of the last head.
            time_unit: unit of both, such as ``days``.
        """
        super().__init__()
        self.kind, h = decay_kind, dimensions.n_heads
        self.strength = nn.Parameter(torch.zeros(h))  # a

        # ln s, with s in seconds: the parameter may be any number, and s is above 0
        low, high = (math.log(x * SECONDS[time_unit]) for x in (decay_shortest, decay_longest))
        start = torch.linspace(low, high, h) if h > 1 else torch.tensor([(low + high) / 2])
        self.log_reach = nn.Parameter(start.to(torch.get_default_dtype()))

        # b is softplus(raw_power), above 0. softplus(x) is log(1 + exp(x)), which is 1 for
        # x = log(exp(1) - 1).
        self.raw_power = nn.Parameter(torch.full((h,), math.log(math.expm1(1.0))))

    def bias(self, q: Tensor, k: Tensor, batch: SequenceBatch) -> Tensor:
        """Return what is added to the logits for the time between query and key.

        It is :meth:`curve`, a learned function of the logarithm of that time, in each head.

        Args:
            q, k: [b, h, t, e] queries and keys, which every scheme is given. Only the type of q is
                read.
            batch: the histories, with times.

        Returns:
            [b, h, t, t] from query (row) to key (column), padded after shorter histories.
        """

        def compute_log_seconds() -> Tensor:
            # ``map_spans`` applies a function to the seconds from each key to each query, padded to
            # [b, t, t]. ``SHORTEST`` stands in place of 0, which has no logarithm.
            return map_spans(batch, lambda spans: spans.clamp_(min=SHORTEST).log_(), q.dtype)

        # They depend on no parameter, so they are computed once for all layers.
        log_seconds = batch.cached(("time_decay", q.dtype), compute_log_seconds)
        return self.curve(log_seconds[:, None])

    def curve(self, log_seconds: Tensor) -> Tensor:
        """Return the learned function of the time between interactions, head by head.

            exponential_power:  a 2^(-(d / s)^b)          power:  a (1 + d / s)^(-b)

        with d the seconds, a the strength, s the reach and b the power of a head.

        Args:
            log_seconds: [..., 1, t, t] natural logarithms of d.

        Returns:
            [..., h, t, t].
        """
        # one number for each head, [h, 1, 1]
        parameters = (self.strength, self.log_reach, self.raw_power)
        strength, log_reach, raw = (x.to(log_seconds.dtype)[:, None, None] for x in parameters)
        power = F.softplus(raw)

        log_ratio = log_seconds - log_reach  # ln(d / s)
        if self.kind == "exponential_power":
            # (d / s)^b is e^(b ln(d / s)). 2^-(e^80) is 0 already; for larger exponents the
            # gradient would be 0 times infinity.
            return strength * torch.exp2(-(power * log_ratio).clamp(max=80.0).exp())
        # ln(1 + d / s) is the softplus of ln(d / s)
        return strength * (-power * F.softplus(log_ratio)).exp()


class TimeIntervalAttention(AttentionPosition):
    """Keys and values with a vector for the time between interactions (Li et al., TiSASRec, 2020).

    e_ij = q_i (k_j + R^K[r_ij] + P^K_j) / sqrt(e), z_i = sum_j a_ij (v_j + R^V[r_ij] + P^V_j),
    with r_ij = min(floor((t_i - t_j) / u_i), intervals); tables are shared by all layers, positions
    count from the newest interaction. The unit u_i is the user's shortest gap between two
    interactions, here up to interaction i. The authors' code takes the shortest gap of the whole
    window, which tells an interaction about later times. Vectors of pairs are never formed: queries
    are multiplied by R^K first, and weights are summed by interval before they multiply R^V.

    Args:
        tisas_intervals: the longest interval; longer ones count as this one.
    """

    options = ("tisas_intervals",)
    needs_time = True
    reads_request = True
    assumes_order = True  # tables have no rows for intervals below 0

    def __init__(self, dimensions: Dimensions, *, tisas_intervals: int) -> None:
        """Create learned vectors for positions, and for the time between two interactions.

        Attention adds them to keys and values (TiSASRec, Li et al., WSDM 2020). The time since an
        older interaction is a whole number, in units of the shortest time between two interactions
        of the user: if that is an hour, a day is 24.

        Args:
            dimensions: sizes of the model. A history has at most ``max_length`` positions, and
                vectors have the size ``hidden_size``.
            tisas_intervals: the largest of these numbers that has a vector of its own. All longer
                times have the same vector as it.
        """
        super().__init__()
        self.max_length = dimensions.max_length
        d, num_intervals = dimensions.hidden_size, tisas_intervals + 1  # the numbers 0, 1, 2, ...
        # Learned tables with a vector of size d in each row, of random numbers when fresh.
        self.position_key = make_table(dimensions, self.max_length, d)
        self.position_value = make_table(dimensions, self.max_length, d)
        self.time_key = make_table(dimensions, num_intervals, d)
        self.time_value = make_table(dimensions, num_intervals, d)

    def share_with(self, first: TimeIntervalAttention) -> None:
        for name, table in first.named_parameters():
            setattr(self, name, table)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, batch: SequenceBatch, dropout: Dropout
    ) -> Tensor:
        """Attend with vectors for positions and for the time between interactions (TiSASRec).

            out_i = sum_j a_ij (v_j + P^V_j + R^V[r_ij])                       over j <= i
            a_i   = softmax_j( q_i . (k_j + P^K_j + R^K[r_ij]) / sqrt(e) )

        P^K_j and P^V_j are learned vectors of the position of j. The interval r_ij is a whole
        number: the time between i and j in units of the user's shortest gap (Li et al., WSDM 2020).
        R^K and R^V are tables with a learned vector for each interval.

        Args:
            query, key, value: [m, h, e] q, k and v of all m interactions, history after history.
            batch: the histories, with times.
            dropout: dropout on the weights a.

        Returns:
            [m, h, e], history after history.
        """
        # Add the vectors of positions, P^K and P^V, a row of a table each. ``age`` counts the newer
        # interactions of the history, so the newest interaction has the last of the n rows.
        _, h, e = value.shape
        row = self.max_length - 1 - batch.age
        key = key + self.position_key[row].view(-1, h, e)
        value = value + self.position_value[row].view(-1, h, e)
        # make all histories of one length t, with zeros after shorter ones ("start")
        block = batch.pad(torch.stack((query, key, value), 1), "start")  # [b, t, 3, h, e]
        q, k, v = block.transpose(1, 3).unbind(2)  # [b, h, t, e] each

        # the intervals r_ij [b, t, t], computed once for all layers; then repeated for all heads
        longest = len(self.time_key) - 1  # the largest interval
        intervals = batch.cached(("tisas", longest), lambda: count_intervals(batch, longest))
        intervals = intervals[:, None].expand(-1, h, -1, -1)  # [b, h, t, t]

        # q_i . (k_j + R^K[r_ij]) / sqrt(e), [b, h, t, t]
        by_time = multiply_by_intervals(q, self.time_key.view(-1, h, e), intervals)
        logits = (q @ k.transpose(-1, -2) + by_time) / math.sqrt(e)

        # the weights a_ij of keys j <= i, [b, h, t, t]
        future = future_mask(batch.width, q.device)
        weights = dropout(logits.masked_fill(future, -torch.inf).softmax(-1))

        # sum_j a_ij (v_j + R^V[r_ij]), [b, h, t, e]; then [m, h, e] without padding
        out = weights @ v + sum_intervals(weights, self.time_value.view(-1, h, e), intervals)
        return batch.unpad(out.transpose(1, 2), "start")


def multiply_by_intervals(q: Tensor, table: Tensor, intervals: Tensor) -> Tensor:
    """Return q_i . table[r_ij] for queries q_i and the intervals r_ij between i and j.

    The vectors table[r_ij] of all pairs would need much memory. So each query is multiplied by all
    vectors of the table first, and then each pair picks the product with the vector of its r_ij.

    Args:
        q: [b, h, t, e] queries.
        table: [num_intervals, h, e] a vector for each interval and head.
        intervals: [b, h, t, t] int64 r_ij with row i and column j.

    Returns:
        [b, h, t, t].
    """
    products = torch.einsum("bhte,rhe->bhtr", q, table)  # q_i . table[r] for all r
    return products.gather(-1, intervals)


def sum_intervals(weights: Tensor, table: Tensor, intervals: Tensor) -> Tensor:
    """Return sum_j a_ij table[r_ij] for weights a_ij and the intervals r_ij between i and j.

    Weights with the same interval are added up first: if query i has the weights 0.2, 0.3, 0.5 and
    the intervals 1, 1, 0, the result is 0.5 table[0] + (0.2 + 0.3) table[1].

    Args:
        weights: [b, h, t, t] a_ij with row i and column j.
        table: [num_intervals, h, e] a vector for each interval and head.
        intervals: [b, h, t, t] int64 r_ij.

    Returns:
        [b, h, t, e].
    """
    zeros = weights.new_zeros(*weights.shape[:3], len(table))
    sums = zeros.scatter_add(-1, intervals, weights)  # [b, h, t, num_intervals]
    return torch.einsum("bhtr,rhe->bhte", sums, table)


def count_intervals(batch: SequenceBatch, longest: int) -> Tensor:
    """Return the time between interactions of a history, in units of the user's shortest gap.

    r_ij = min(floor((t_i - t_j) / u_i), longest) for interaction i and an older one j. The unit u_i
    is the shortest gap above 0 between two neighbours among the interactions up to i; later ones
    are unknown at i. For a history with the times 0, 60 and 90 seconds the rows of r are

        i = 0    no gap yet    0
        i = 1    u_i = 60      1, 0
        i = 2    u_i = 30      3, 1, 0

    If the dataset has times of requests, t_i is the time at which the item after i is requested.

    Args:
        batch: the histories, with times.
        longest: the largest number that is returned.

    Returns:
        [b, t, t] int64 with row i and column j, padded after shorter histories. Entries of newer
        interactions j and of padding have no meaning.
    """
    # t_i and t_j, in seconds since the oldest interaction of each history, [b, t] each
    query_times, key_times = pad_times(batch)

    # the time to the interaction before, [b, t]; 0 for the first; and the shortest up to each one
    gap = key_times.diff(dim=1, prepend=key_times[:, :1])
    unit = gap.masked_fill(gap <= 0, torch.inf).cummin(1).values
    unit = unit.masked_fill(unit.isinf(), 1)  # where there is no gap yet, count in seconds

    # every t_i (rows) less every t_j (columns), in the unit of row i
    intervals = (query_times[:, :, None] - key_times[:, None]) / unit[:, :, None]
    return intervals.clamp(0, longest).long()
