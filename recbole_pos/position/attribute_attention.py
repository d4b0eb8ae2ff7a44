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
        """Create the tables P^K, P^V [n, d] of positions and R^K, R^V [intervals + 1, d] of times.

        Args:
            dimensions: sizes of the model.
            tisas_intervals: the longest interval that has a row, in units of the user's shortest
                gap; longer ones read the same row.
        """
        super().__init__()
        self.max_length = dimensions.max_length
        d, num_intervals = dimensions.hidden_size, tisas_intervals + 1  # from 0 on
        # a learned vector in each row, normal when fresh
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

        r_ij is the interval between i and j: a whole number, the time between them in units of the
        user's shortest gap (Li et al., WSDM 2020). Learned are vectors P of positions
        (``position_key``, ``position_value``) and R of intervals (``time_key``, ``time_value``),
        one in each row of a table. A vector R for every pair i, j would need e times the memory of
        a_ij, so none is formed. Instead

            q_i . R^K[r]          is computed for every interval r, and that of r_ij is picked;
            sum_j a_ij R^V[r_ij]  is sum_r w_ir R^V[r], where w_ir is the sum of those a_ij whose
                                  interval r_ij is r.

        Args:
            query, key, value: [m, h, e] q, k and v of all m interactions, history after history.
            batch: the histories, with times.
            dropout: dropout on the weights a.

        Returns:
            [m, h, e], history after history.
        """
        # Add the vectors P of positions. ``age`` counts the newer interactions of the history, so
        # the newest interaction has the last of the n rows.
        _, h, e = value.shape
        row = self.max_length - 1 - batch.age
        key = key + self.position_key[row].view(-1, h, e)
        value = value + self.position_value[row].view(-1, h, e)
        # histories of one length t, with zeros after shorter ones ("start")
        block = batch.pad(torch.stack((query, key, value), 1), "start")  # [b, t, 3, h, e]
        q, k, v = block.transpose(1, 3).unbind(2)  # [b, h, t, e] each

        # r_ij [b, t, t], computed once for all layers, and the same for all heads: [b, h, t, t]
        longest = len(self.time_key) - 1
        intervals = batch.cached(("tisas", longest), lambda: count_intervals(batch, longest))
        intervals = intervals[:, None].expand(-1, h, -1, -1)

        # logits [b, h, t, t], with the products q_i . R^K[r], [b, h, t, intervals]
        by_interval = torch.einsum("bhte,rhe->bhtr", q, self.time_key.view(-1, h, e))
        logits = (q @ k.transpose(-1, -2) + by_interval.gather(-1, intervals)) / math.sqrt(e)

        # the weights a_ij of keys j <= i, [b, h, t, t]
        future = future_mask(batch.width, q.device)
        weights = dropout(logits.masked_fill(future, -torch.inf).softmax(-1))

        # the sums w_ir, [b, h, t, intervals]: each weight is added to that of its interval
        sums = weights.new_zeros(by_interval.shape).scatter_add(-1, intervals, weights)
        time_value = self.time_value.view(-1, h, e)
        out = weights @ v + torch.einsum("bhtr,rhe->bhte", sums, time_value)
        return batch.unpad(out.transpose(1, 2), "start")  # [b, h, t, e] to [m, h, e]


def count_intervals(batch: SequenceBatch, longest: int) -> Tensor:
    """Return the time between interactions of a history, in units of the user's shortest gap.

    r_ij = min(floor((t_i - t_j) / u_i), longest), where the unit u_i is the shortest gap above 0
    between two neighbours up to interaction i. Times 0, 60, 90 have the units -, 60 and 30 s, so
    that the third interaction is 3 units after the first.

    Args:
        batch: the histories, with times.
        longest: the largest number that is returned.

    Returns:
        [b, t, t] int64 from interaction i (row) to j, padded after shorter histories. Entries of
        the future and of padding have no meaning.
    """
    # Seconds [b, t] since the oldest interaction. The time of a query is that of its interaction
    # or, if the times of requests are known, that at which the item after it is requested.
    query_times, key_times = pad_times(batch)

    # the shortest gap above 0 to the interaction before, among those up to each interaction
    gap = key_times.diff(dim=1, prepend=key_times[:, :1])
    unit = gap.masked_fill(gap <= 0, torch.inf).cummin(1).values
    # Without a gap so far the interactions so far have equal times, and intervals of 0 in any unit;
    # the time to a later request is then counted in seconds.
    unit = unit.masked_fill(unit.isinf(), 1)
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
        """Create a table of vectors, queries Q and keys K for the position and each field of items.

        Args:
            dimensions: sizes of the model, and the function that gives the tokens of a field.
            difsr_fields: token or token_seq fields of items.
            difsr_size: size of the vectors of fields.
        """
        super().__init__()
        fields = [difsr_fields] if isinstance(difsr_fields, str) else difsr_fields
        self.n_heads, self.max_length = dimensions.n_heads, dimensions.max_length
        self.position = make_table(dimensions, self.max_length, dimensions.hidden_size)  # [n, d]

        # for each field the tokens of all items, and a table with a vector for each token
        self.tables = nn.ParameterList()
        for index, field in enumerate(fields):
            assert dimensions.attribute is not None  # PosSASRec, which runs schemes, sets it
            tokens = dimensions.attribute(field)  # [items, s], 0 is padding
            self.register_buffer(f"tokens_{index}", tokens, persistent=False)
            num_tokens = int(tokens.max()) + 1
            self.tables.append(make_table(dimensions, num_tokens, difsr_size))

        # Q and K: the position has vectors of size d, fields have shorter ones
        sizes = [dimensions.hidden_size] + [difsr_size] * len(self.tables)
        self.queries = nn.ModuleList(nn.Linear(size, size) for size in sizes)
        self.keys = nn.ModuleList(nn.Linear(size, size) for size in sizes)

    def share_with(self, first: DecoupledAttributes) -> None:
        self.position, self.tables = first.position, first.tables

    def bias(self, q: Tensor, k: Tensor, batch: SequenceBatch) -> Tensor:
        """Return what attributes and positions add to the logits (DIF-SR, Xie et al., SIGIR 2022).

            B_ij = sum_f (a^f_i Q_f) . (a^f_j K_f) / sqrt(e_f)

        over the position and the fields f of items, with a^f_i the vector of interaction i.

        Args:
            q, k: [b, h, t, e] queries and keys of the items; only the type of q is read.
            batch: the histories.

        Returns:
            [b, h, t, t] from interaction i (row) to j, padded after shorter histories.
        """
        total = torch.zeros((), device=q.device)
        # a vector of the position, then one of each field, with a linear layer Q and K of its own
        for vector, query, key in zip(self._embed(batch), self.queries, self.keys, strict=True):
            field_q = self._split_heads(query(vector), batch)  # a^f_i Q_f, [b, h, t, e_f]
            field_k = self._split_heads(key(vector), batch)
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
