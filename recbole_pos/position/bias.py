"""Terms added to the logits, by distance, by context or by attributes of items; and none.

Distances i - j of query i and key j count interactions. The causal mask comes later, so entries
above the diagonal do not matter. Shapes as in ``layers/sequence_batch.py``.

Reference of attributes (``DecoupledAttributes``), a baseline of AttrFormer's Table 6:
    Yueqi Xie, Peilin Zhou, Sunghun Kim. "Decoupled Side Information Fusion for Sequential
    Recommendation." SIGIR 2022.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recbole_pos.errors import UsageError
from recbole_pos.layers.hooks import AttentionPosition, Dimensions
from recbole_pos.layers.sequence_batch import SequenceBatch
from recbole_pos.position.additive import make_table


class NoPosition(AttentionPosition):
    """No position: order comes from the causal mask only (Kazemnejad et al., NoPE, 2023)."""


class DistanceBias(AttentionPosition):
    """Base of B_ij = f_h(i - j) with one function per head."""

    def curve(self, distance: Tensor) -> Tensor:
        """Return the bias [h, t] of each head at the distances 0 to t - 1, [t] int64."""
        raise NotImplementedError

    def bias(self, q: Tensor, k: Tensor, batch: SequenceBatch) -> Tensor:
        """Return B_ij = f(i - j), the same for all histories: [1, h, t, t] in the type of ``q``.

        Above the diagonal, where a key is newer than the query, it has the value of distance 0,
        which the causal mask hides.

        Args:
            q, k: [b, h, t, e] queries and keys; only the type of q is read.
            batch: the histories, the longest of length t.

        Returns:
            [1, h, t, t].
        """
        position = torch.arange(batch.width, device=q.device)
        curve = self.curve(position).to(q.dtype)  # [h, t], f at the distances 0 to t - 1
        # put each number where query i and key j have that distance
        distance = (position[:, None] - position[None, :]).clamp_(min=0)
        return curve[:, distance].unsqueeze(0)


class ALiBi(DistanceBias):
    """Linear decay with a fixed slope per head, -m_h (i - j) (Press et al., ALiBi, 2022).

    If the number h of heads is a power of two, slopes are 2^(-8/h), 2^(-16/h), ... Otherwise they
    are the slopes of the next lower power of two, then every other slope of twice that number.
    """

    slopes: Tensor

    def __init__(self, dimensions: Dimensions) -> None:
        """Compute how fast the bias of each head falls with the distance, its slope, [h, 1].

        If h is a power of two, head i = 1, ..., h has the slope 2^(-8 i / h): 4 heads have 1/4,
        1/16, 1/64 and 1/256. Otherwise heads are filled up with every second slope of twice that
        power: 6 heads have these four and, of the slopes of 8 heads, the first and the third, 1/2
        and 1/8 (Press et al., ALiBi, 2022, section 3).

        Args:
            dimensions: sizes of the model, with h heads.
        """
        super().__init__()
        h = dimensions.n_heads
        power = 2 ** int(math.log2(h))  # the largest power of two up to h
        slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
        finer_slopes = [2 ** (-8 * i / (2 * power)) for i in range(1, 2 * power, 2)]
        slopes += finer_slopes[: h - power]
        self.register_buffer("slopes", torch.tensor(slopes)[:, None], persistent=False)

    def curve(self, distance: Tensor) -> Tensor:
        return -self.slopes * distance


class T5Bias(DistanceBias):
    """A learned bias per head and bucket of distances (Raffel et al., T5, 2020).

    Half of the buckets hold one distance each; the others grow logarithmically up to
    ``t5_max_distance``, and the last one takes all larger distances. Fresh biases are zero.

    Args:
        t5_buckets: number of buckets, at least 2.
        t5_max_distance: smallest distance that is always in the last bucket.
    """

    options = ("t5_buckets", "t5_max_distance")
    bucket: Tensor

    def __init__(self, dimensions: Dimensions, *, t5_buckets: int, t5_max_distance: int) -> None:
        """Create a learned bias for each bucket of distances, and find the bucket of each distance.

        The first half of the buckets, ``exact`` in number, have one distance each. The others grow
        by a constant factor up to ``t5_max_distance``:

            growth = ln(distance / exact) / ln(t5_max_distance / exact)
            bucket = exact + floor(growth * (t5_buckets - exact))

        With 8 buckets and a largest distance of 16 the distances 0 to 3 have a bucket each; then
        buckets begin at 4, 5.7, 8 and 11.3.

        Args:
            dimensions: sizes of the model.
            t5_buckets: number of buckets.
            t5_max_distance: smallest distance that is always in the last bucket.

        Raises:
            UsageError: if there are fewer than two buckets, or ``t5_max_distance`` is not above
                half of their number.
        """
        super().__init__()
        if t5_buckets < 2 or t5_max_distance <= t5_buckets // 2:
            raise UsageError(
                "t5_buckets must be at least 2 and t5_max_distance more than half of it, found "
                f"{t5_buckets} and {t5_max_distance}"
            )
        self.weight = nn.Parameter(torch.zeros(dimensions.n_heads, t5_buckets))  # the biases

        # half of the buckets in equal steps, the other half in steps of the logarithm
        exact = t5_buckets // 2  # buckets of one distance each
        distance = torch.arange(dimensions.max_length)
        # growth of the logarithm: 0 where the second half begins, 1 at t5_max_distance
        growth = (distance.clamp(min=1).double() / exact).log() / math.log(t5_max_distance / exact)
        far = exact + (growth * (t5_buckets - exact)).long()
        bucket = torch.where(distance < exact, distance, far.clamp(max=t5_buckets - 1))
        self.register_buffer("bucket", bucket, persistent=False)

    def curve(self, distance: Tensor) -> Tensor:
        return self.weight[:, self.bucket[distance]]


class KERPLE(DistanceBias):
    """Kernelised distance with two learned numbers per head (Chi et al., KERPLE, 2022).

    ``log``: -r1 log(1 + r2 (i - j)) with r1, r2 > 0; ``power``: -r1 (i - j)^r2 with r1 > 0 and
    0 < r2 <= 2. Both are kept in range by softplus, and twice a sigmoid; the authors clamp.

    Args:
        kerple_kind: ``log`` or ``power``.
    """

    options = ("kerple_kind",)

    def __init__(self, dimensions: Dimensions, *, kerple_kind: str) -> None:
        """Create the parameters of each head's bias, a function of the distance of two positions.

            log:    -r1 log(1 + r2 distance),   r1 = softplus(raw_r1),  r2 = softplus(raw_r2)
            power:  -r1 distance^r2,            r1 = softplus(raw_r1),  r2 = 2 sigmoid(raw_r2)

        r1 is how strong the bias is, and r2 how fast it falls with the distance. Learned are
        ``raw_r1`` and ``raw_r2``, [h] each, which may be any numbers. Fresh r1 and r2 are equal and
        differ from head to head: with 4 heads they are 1/8, 3/8, 5/8, 7/8.

        Args:
            dimensions: sizes of the model, with h heads.
            kerple_kind: ``log`` or ``power``.
        """
        super().__init__()
        self.kind, h = kerple_kind, dimensions.n_heads
        fresh = (torch.arange(h) + 0.5) / h  # r1 and r2
        # softplus(log(exp(x) - 1)) is x, and so is 2 sigmoid(logit(x / 2))
        self.raw_r1 = nn.Parameter(fresh.expm1().log())
        is_log = kerple_kind == "log"
        self.raw_r2 = nn.Parameter(fresh.expm1().log() if is_log else (fresh / 2).logit())

    def curve(self, distance: Tensor) -> Tensor:
        """Return the bias of each head at some distances (KERPLE, Chi et al., 2022).

        It is -r1 log(1 + r2 distance) for the kind ``log``, -r1 distance^r2 for ``power``. Softplus
        keeps r1 and r2 above 0, and twice a sigmoid keeps the r2 of ``power`` between 0 and 2.

        Args:
            distance: [t] int64 distances, from 0 on.

        Returns:
            [h, t].
        """
        r1 = F.softplus(self.raw_r1)[:, None]
        raw_r2 = self.raw_r2[:, None]
        if self.kind == "log":
            return -r1 * torch.log1p(F.softplus(raw_r2) * distance)
        # 0^r2 is 0 for every r2; powers of 1 or more keep the gradient to r2 finite
        power = distance.clamp(min=1).to(r1.dtype) ** (2 * raw_r2.sigmoid())
        return -r1 * power.masked_fill(distance == 0, 0)


class ContextualPosition(AttentionPosition):
    """Contextual positions that count dissimilar interactions (Yuan et al., CAPE, 2025).

    With the gate g_ij = 1 - sigmoid(q_i . k_j), key j has the position p_ij = g_ij + ... + g_ii for
    query i, clamped to the table, and B_ij = q_i . e[p_ij], where e[p] is interpolated linearly
    between the two neighbouring rows. The table is shared by the heads of a layer and starts at
    zero. The gates make [b, h, t, t] tensors unavoidable.

    Args:
        cape_positions: rows of the table; MAX_ITEM_LIST_LENGTH if None.
    """

    options = ("cape_positions",)

    def __init__(self, dimensions: Dimensions, *, cape_positions: int | None) -> None:
        """Create the learned table ``weight``, at first 0, with a vector for each position.

        Positions are 0, 1, ...; :meth:`bias` interpolates between them.

        Args:
            dimensions: sizes of the model; vectors have the size of a head.
            cape_positions: number of positions; None for the maximum length of a history.
        """
        super().__init__()
        num_rows = dimensions.max_length if cape_positions is None else cape_positions
        self.weight = nn.Parameter(torch.zeros(num_rows, dimensions.head_size))

    def bias(self, q: Tensor, k: Tensor, batch: SequenceBatch) -> Tensor:
        """Return the bias of each pair of interactions by contextual positions (CAPE, Yuan et al.).

        The position of key j for query i counts the keys from j to i that are unlike the query:

            gate_ij      = 1 - sigmoid(q_i . k_j)
            position_ij  = gate_ij + gate_i(j+1) + ... + gate_ii
            bias_ij      = q_i . weight[position_ij]

        If the third query has the gates 0.2, 0.5, 0.1 to the keys up to itself, their positions are
        0.8, 0.6, 0.1. ``weight`` is a learned table with a vector of size e for each of the
        positions 0, 1, 2, ... Vectors of positions between these are interpolated.

        Args:
            q, k: [b, h, t, e] queries and keys.
            batch: the histories.

        Returns:
            [b, h, t, t] from query i (row) to key j. Entries of newer keys, j > i, have no meaning.
        """
        with torch.autocast(q.device.type, enabled=False):  # a position needs all its digits
            exact_q, exact_k = q.to(self.weight.dtype), k.to(self.weight.dtype)
            # 1 - sigmoid(x) is sigmoid(-x); the gates of newer keys are 0
            gate = (-(exact_q @ exact_k.transpose(-1, -2))).sigmoid().tril()
            # sums from the newest key to the oldest, then put back in order
            newest_first = gate.flip(-1)  # 0.1, 0.5, 0.2 in the example
            position = newest_first.cumsum(-1).flip(-1)  # 0.1, 0.6, 0.8; flipped 0.8, 0.6, 0.1

            # A query has at most t keys, with gates of at most 1: no position is above t.
            num_keys = batch.block_width("end")  # t
            # q_i . weight[position_ij], interpolated
            return self._interpolate(exact_q, position, max_position=num_keys).to(q.dtype)

    def _interpolate(self, q: Tensor, position: Tensor, max_position: int) -> Tensor:
        """Return q_i . weight[position_ij] for positions between the rows of ``weight``.

        ``weight`` is the learned table [rows, e]. Position 1.3 stands for the vector
        0.7 weight[1] + 0.3 weight[2], and one behind the last row for the last row. Instead of the
        vectors of all pairs, which would need much memory, products are interpolated:
        0.7 (q_i . weight[1]) + 0.3 (q_i . weight[2]).

        Args:
            q: [b, h, t, e] queries.
            position: [b, h, t, t] position of each key j (column) for each query i.
            max_position: a number that no position exceeds; rows beyond it are not read.

        Returns:
            [b, h, t, t].
        """
        num_rows = min(len(self.weight), max_position + 1)
        position = position.clamp(max=num_rows - 1)
        products = q @ self.weight[:num_rows].t()  # q_i . weight[row], [b, h, t, num_rows]

        # the rows on both sides of each position, and the share of the upper one: 1, 2 and 0.3
        floor = position.detach().floor()
        fraction = position - floor
        lower = floor.long()
        upper = (lower + 1).clamp_(max=num_rows - 1)
        # gather picks, for each query and key, the product with that row
        return (1 - fraction) * products.gather(-1, lower) + fraction * products.gather(-1, upper)


class DecoupledAttributes(AttentionPosition):
    """Logits of attributes and positions, each by itself (Xie et al., DIF-SR, 2022).

    B_ij = sum_f (a^f_i Q_f)(a^f_j K_f) / sqrt(e_f), over the item fields named and the position, so
    that values are only the items'. An item's vector of a field is the mean over its tokens,
    zero where it has none; tables are shared by all layers. Fields are added up, DIF-SR's ``sum``;
    positions count from the newest interaction. Its auxiliary loss, by which states also predict
    the attributes of the next item, is left out.

    Args:
        dimensions: sizes of the model; ``attribute`` gives the fields of items.
        difsr_fields: token or token_seq fields of items.
        difsr_size: size of the vectors of fields.
    """

    options = ("difsr_fields", "difsr_size")

    def __init__(
        self, dimensions: Dimensions, *, difsr_fields: Sequence[str], difsr_size: int
    ) -> None:
        """Create what attention by position and by attributes of items needs (DIF-SR, SIGIR 2022).

        An attribute is a field of items, such as the category; its values are tokens, from 1 on.
        The position and each field have three things of their own: a table with a learned vector
        for each position or token, and two linear layers, which turn these vectors into queries
        and keys. The products of queries and keys are added to the logits of attention.

        Args:
            dimensions: sizes of the model. Its function ``attribute`` returns the tokens of all
                items in a field.
            difsr_fields: names of the fields, each with a token or several for an item.
            difsr_size: size of the vectors of tokens; those of positions have the hidden size.
        """
        super().__init__()
        fields = [difsr_fields] if isinstance(difsr_fields, str) else difsr_fields
        self.n_heads, self.max_length = dimensions.n_heads, dimensions.max_length
        # vectors of positions: a row for each of the n positions, [n, d]
        self.position = make_table(dimensions, self.max_length, dimensions.hidden_size)

        # for each field the tokens of all items, and a table with a vector for each token
        self.tables = nn.ParameterList()
        for index, field in enumerate(fields):
            assert dimensions.attribute is not None  # models that take schemes have the function
            tokens = dimensions.attribute(field)  # [items, s] for at most s tokens, 0 for none
            self.register_buffer(f"tokens_{index}", tokens, persistent=False)
            num_tokens = int(tokens.max()) + 1
            self.tables.append(make_table(dimensions, num_tokens, difsr_size))

        # linear layers for queries and keys: of the position first, then of each field
        sizes = [dimensions.hidden_size] + [difsr_size] * len(self.tables)
        self.queries = nn.ModuleList(nn.Linear(size, size) for size in sizes)
        self.keys = nn.ModuleList(nn.Linear(size, size) for size in sizes)

    def share_with(self, first: DecoupledAttributes) -> None:
        self.position, self.tables = first.position, first.tables

    def bias(self, q: Tensor, k: Tensor, batch: SequenceBatch) -> Tensor:
        """Return what attributes and positions add to the logits (DIF-SR, Xie et al., SIGIR 2022).

            B_ij = sum_f (a^f_i Q_f) . (a^f_j K_f) / sqrt(e_f)

        The sum is over the position and the attributes of items, such as the category. a^f_i is the
        vector of attribute f, or of the position, at interaction i. Q_f and K_f are linear layers,
        whose output is cut into heads of size e_f.

        Args:
            q, k: [b, h, t, e] queries and keys of the items, which every scheme is given. They do
                not enter the sum; the result has the type of q.
            batch: the histories.

        Returns:
            [b, h, t, t] with row i and column j, padded after shorter histories.
        """
        # for all m interactions: [m, d] of the position, then [m, difsr_size] of each attribute
        vectors = self._embed(batch)
        total = torch.zeros((), device=q.device)
        for vector, query, key in zip(vectors, self.queries, self.keys, strict=True):
            field_q = self._split_heads(query(vector), batch)  # a^f_i Q_f, [b, h, t, e_f]
            field_k = self._split_heads(key(vector), batch)  # a^f_j K_f, [b, h, t, e_f]
            total = total + field_q @ field_k.transpose(-1, -2) / math.sqrt(field_q.size(-1))
        return total.to(q.dtype)

    def _split_heads(self, x: Tensor, batch: SequenceBatch) -> Tensor:
        """Cut vectors [m, h e_f] of all interactions into heads of each history, [b, h, t, e_f]."""
        heads = x.view(x.size(0), self.n_heads, -1)  # ``len`` would be a number when traced
        return batch.pad(heads, "start").transpose(1, 2)  # zeros follow shorter histories

    def _embed(self, batch: SequenceBatch) -> list[Tensor]:
        """Return the vectors of the position and of each field, for every interaction.

        The vector of a field is the mean over the item's tokens, zero if it has none. ``batch`` has
        m interactions.

        Returns:
            [m, d] for the position, which counts from the newest interaction, then
            [m, difsr_size] for each field.
        """
        # ``age`` is the number of newer interactions of the history, so the newest has the last
        # row. tokens_0, tokens_1, ... are the tokens of all items, [items, s] for each field.
        vectors = [self.position[self.max_length - 1 - batch.age]]
        for index, table in enumerate(self.tables):
            tokens = getattr(self, f"tokens_{index}")[batch.items]  # [m, s]
            is_token = (tokens > 0).to(table.dtype)
            # the mean; an item without tokens has a sum of 0, divided by 1
            total = (table[tokens] * is_token[..., None]).sum(1)
            vectors.append(total / is_token.sum(1, keepdim=True).clamp(min=1))
        return vectors
