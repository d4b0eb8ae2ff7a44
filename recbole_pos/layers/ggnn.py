"""Gated graph layers over session graphs (PosRec, section 4.3.2; SR-GNN without anchors)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recbole_pos.layers.context import SequenceContext


class PGGNN(nn.Module):
    """One layer: messages from in- and out-neighbours, then a GRU update (equations 7 and 8).

        m_t  = sum_t' w_in[t, t'] x_t' W_in  ||  sum_t' w_out[t, t'] x_t' W_out
        x'_t = GRU(x_t, m_t)                       m_t the input, x_t the state

    Whether anchors are among the neighbours is a matter of the weights, see ``neighbourhoods``.

    Args:
        hidden_size: d.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.into = nn.Linear(hidden_size, hidden_size, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)
        self.gru = nn.GRUCell(2 * hidden_size, hidden_size)

    def forward(self, x: Tensor, weights: Tensor, nodes: SequenceContext) -> Tensor:
        """Nodes [k, d] and their weights [b, 2, n, n] to [k, d]."""
        # sum first, then the product, so that padding is never multiplied with W
        sums = weights.flatten(1, 2) @ nodes.pad(x, "start")  # [b, 2n, d]
        sums = nodes.unpad(sums.unflatten(1, (2, -1)).transpose(1, 2), "start")  # [k, 2, d]
        message = torch.cat((self.into(sums[:, 0]), self.out(sums[:, 1])), 1)
        return self.gru(message, x)
