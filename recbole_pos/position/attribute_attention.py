"""Attention of two attribute-aware models, as schemes: TiSASRec's intervals, DIF-SR's attributes.

The baselines of AttrFormer's Table 6 that RecBole does not have. Shapes as in
``layers/sequence_batch.py``, and r intervals.

References:
    Jiacheng Li, Yujie Wang, Julian McAuley. "Time Interval Aware Self-Attention for Sequential
    Recommendation." WSDM 2020.
    Yueqi Xie, Peilin Zhou, Sunghun Kim. "Decoupled Side Information Fusion for Sequential
    Recommendation." SIGIR 2022.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recbole_pos.layers.attention import Dropout, future_mask
from recbole_pos.layers.hooks import AttentionPosition, Dimensions
from recbole_pos.layers.sequence_batch import SequenceBatch
from recbole_pos.position.additive import make_table
from recbole_pos.position.time_intervals import pad_times


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
        R^K and R^V are tables with a learned vector for each interval. The vectors of all pairs
        i, j would need e times the memory of a_ij, so they are never formed.

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

        # q_i . R^K[r] for every interval r, [b, h, t, intervals]; ``gather`` picks that of r_ij
        by_interval = torch.einsum("bhte,rhe->bhtr", q, self.time_key.view(-1, h, e))
        logits = (q @ k.transpose(-1, -2) + by_interval.gather(-1, intervals)) / math.sqrt(e)

        # the weights a_ij of keys j <= i, [b, h, t, t]
        future = future_mask(batch.width, q.device)
        weights = dropout(logits.masked_fill(future, -torch.inf).softmax(-1))

        # sum_j a_ij R^V[r_ij] is sum_r w_ir R^V[r]: w_ir, [b, h, t, intervals], is the sum of those
        # a_ij whose interval r_ij is r
        sums = weights.new_zeros(by_interval.shape).scatter_add(-1, intervals, weights)
        by_time = torch.einsum("bhtr,rhe->bhte", sums, self.time_value.view(-1, h, e))
        out = weights @ v + by_time
        return batch.unpad(out.transpose(1, 2), "start")  # [b, h, t, e] to [m, h, e]


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
