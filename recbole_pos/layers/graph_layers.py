"""Layers over session graphs: gated messages (PosRec), weighted attention and Set2Set (FGNN).

References:
    Ruihong Qiu et al. "Exploiting Positional Information for Session-based Recommendation."
    ACM Transactions on Information Systems 2021, section 4.3.2.
    Ruihong Qiu et al. "Rethinking the Item Order in Session-based Recommendation with Graph Neural
    Networks." CIKM 2019.

Shapes as in ``graph.py``, and h heads that have all d columns each.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recbole_pos.layers.context import SequenceContext


class PGGNN(nn.Module):
    """One layer: messages from in- and out-neighbours, then a GRU update (equations 7 and 8).

        m_t  = sum_t' w_in[t, t'] x_t' W_in  ||  sum_t' w_out[t, t'] x_t' W_out
        x'_t = GRU(x_t, m_t)                       m_t the input, x_t the state

    The weights decide whether anchors are among the neighbours, see ``weigh_neighbours``.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.into = nn.Linear(hidden_size, hidden_size, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)
        self.gru = nn.GRUCell(2 * hidden_size, hidden_size)

    def forward(self, x: Tensor, weights: Tensor, nodes: SequenceContext) -> Tensor:
        """Update nodes [k, d] by messages with weights [b, 2, n, n] (``weigh_neighbours``)."""
        # sum first, then the product, so that padding is never multiplied with W
        sums = weights.flatten(1, 2) @ nodes.pad(x, "start")  # [b, 2n, d]
        sums = nodes.unpad(sums.unflatten(1, (2, -1)).transpose(1, 2), "start")  # [k, 2, d]
        message = torch.cat((self.into(sums[:, 0]), self.out(sums[:, 1])), 1)
        return self.gru(message, x)


class WGAT(nn.Module):
    """One layer: every node attends to the nodes with an edge to it, by their weights too.

        e_ij  = LeakyReLU(a^T [W x_i || W x_j || w_ij])        for j with an edge to i of weight w
        x'_i  = 1/h sum over heads of  sum_j softmax_j(e_ij) W x_j + b

    a^T is applied in three parts, so that no [b, n, n, d] exists.

    Args:
        hidden_size: d.
        n_heads: h, each with its own W and a.
    """

    def __init__(self, hidden_size: int, n_heads: int) -> None:
        """Create the weights W [h, d, d] and a [h, 2d + 1] of the heads, and the bias b [d]."""
        super().__init__()
        self.n_heads = n_heads
        self.weight = nn.Parameter(torch.empty(n_heads, hidden_size, hidden_size))
        self.attention = nn.Parameter(torch.empty(n_heads, 2 * hidden_size + 1))
        self.bias = nn.Parameter(torch.zeros(hidden_size))
        for head in self.weight.data:
            nn.init.xavier_uniform_(head)
        nn.init.xavier_uniform_(self.attention)

    def forward(self, x: Tensor, weights: Tensor, nodes: SequenceContext) -> Tensor:
        """Return nodes [k, d] updated by attention.

        ``weights`` [b, n, n] has the weight of the edge to node i (row) from node j (column), 0 for
        no edge. Every node, padding too, needs an edge to itself: a softmax over none is NaN.
        """
        d = x.size(1)
        a_target, a_source, a_edge = self.attention.split((d, d, 1), 1)
        projected = torch.einsum("hed,kd->hke", self.weight, x)
        ends = torch.einsum("hke,she->ksh", projected, torch.stack((a_target, a_source)))
        target, source = nodes.pad(ends, "start").permute(2, 3, 0, 1)  # [h, b, n] both
        logits = target[..., None] + source[:, :, None] + a_edge[:, :, None, None] * weights
        logits = nn.functional.leaky_relu(logits, 0.2)
        logits = logits.masked_fill(weights == 0, -torch.inf)
        values = nodes.pad(projected.transpose(0, 1), "start").permute(2, 0, 1, 3)  # [h, b, n, d]
        mixed = (logits.softmax(-1) @ values).mean(0)
        return nodes.unpad(mixed, "start") + self.bias


class GRUSet2Set(nn.Module):
    """Summarise a set of nodes by repeated attention; each answer updates the next query.

        q_t   = GRU(q*_(t-1), q_(t-1))                         q_0 = q*_0 = 0
        r_t   = sum_i softmax_i(x_i . q_t) x_i
        q*_t  = q_t || r_t

    Set2Set (Vinyals et al., ICLR 2016) with a GRU for the LSTM.

    Args:
        hidden_size: d.
        steps: number of queries.
    """

    def __init__(self, hidden_size: int, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.gru = nn.GRUCell(2 * hidden_size, hidden_size)

    def forward(self, x: Tensor, nodes: SequenceContext) -> Tensor:
        """Return the summary q* [b, 2d] of every session's nodes [k, d]."""
        block = nodes.pad(x, "start")
        query = x.new_zeros(nodes.batch_size, x.size(1))
        summary = torch.cat((query, query), 1)
        for _ in range(self.steps):
            query = self.gru(summary, query)
            logits = (block @ query[:, :, None]).squeeze(2).masked_fill(nodes.padding, -torch.inf)
            answer = (logits.softmax(1)[:, None] @ block).squeeze(1)
            summary = torch.cat((query, answer), 1)
        return summary
