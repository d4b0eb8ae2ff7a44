"""Blocks with gates: HSTU's, without softmax and feed-forward network, and LiGR's.

HSTU's attention has no softmax, and its output is gated. In LiGR's block a gate on the input
decides how much of a sub-layer's output is added. Shapes as in ``sequence_batch.py``.

References:
    Jiaqi Zhai et al. "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers
    for Generative Recommendations." ICML 2024, equations 1 to 3 (HSTU).
    Fedor Borisyuk et al. "From Features to Transformers: Redefining Ranking for Scalable Impact."
    2025 (LiGR).
    Daria Tikhonovich et al. "eSASRec: Enhancing Transformer-based Recommendations in a Modular
    Fashion." RecSys 2025, which puts LiGR's blocks into SASRec.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from recbole_pos.errors import UsageError
from recbole_pos.layers.attention import Dropout
from recbole_pos.layers.forward import (
    BlockOptions,
    FeedForward,
    MultiHeadAttention,
    TransformerLayer,
)
from recbole_pos.layers.hooks import AttentionPosition, replaces_attention
from recbole_pos.layers.large_products import compute_in_chunks
from recbole_pos.layers.sequence_batch import SequenceBatch


class PointwiseAttention(MultiHeadAttention):
    """HSTU's attention sub-layer with the hooks of ``hooks.py`` (equations 1 to 3).

        U, V, Q, K = split(SiLU(f1(Norm(x))))
        A = SiLU(Q K^T + B) / n  under the causal mask
        y = f2(Norm(A V) * U) + x

    Logits are not scaled, and n is the maximum length, so that results do not depend on the batch.
    f1 is ``query``, ``key``, ``value`` and ``gate``; f2 is ``dense``. Dropout comes before f2, as
    in the authors' code. Differences to that code: ``attn_dropout`` applies to A, both norms learn
    scale and shift, ``bias`` is for f1 and f2, and sizes and fresh weights are the backbone's.

    Args:
        options: options of the block; ``inner_size`` and ``hidden_act`` are not used.
        position: the scheme of this layer, which cannot replace attention.

    Raises:
        UsageError: if the scheme replaces attention.
    """

    def __init__(self, options: BlockOptions, position: AttentionPosition) -> None:
        """Build the sub-layer with its gate, which multiplies the output of attention.

        Args:
            options: sizes and switches of the layer.
            position: position scheme of the layer: a module that changes attention by the order or
                the times of interactions. One that computes attention itself does not go with HSTU,
                whose attention has no softmax.

        Raises:
            UsageError: if the scheme, or one that it is made of, replaces attention.
        """
        for name, scheme in position.parts().items():
            if replaces_attention(type(scheme)):
                raise UsageError(
                    f"block: hstu has an attention of its own, and {name} replaces attention; use "
                    "block: transformer or another position"
                )
        super().__init__(options, position)
        d = options.hidden_size
        self.gate = nn.Linear(d, d, bias=options.bias)
        self.gate_norm = nn.LayerNorm(d, eps=options.layer_norm_eps)

    def forward(self, x: Tensor, batch: SequenceBatch) -> Tensor:
        """Apply HSTU's attention with a residual (Zhai et al., ICML 2024, equations 1 to 3).

            U, V, Q, K = split(SiLU(f1(Norm(x))))
            y = f2(Norm( (SiLU(Q K^T + B) / n) V ) * U) + x

        f1 is the linear layers of query, key, value and gate, and f2 is ``dense``. B is the bias of
        the position scheme, n the maximum length of a history, and * a product element by element.
        ``_compute_weights`` returns SiLU(Q K^T + B) / n, [b, h, t, t].

        Args:
            x: [m, d] inputs x, one for each of the m interactions, history after history.
            batch: the b histories, the longest with t interactions.

        Returns:
            [m, d] outputs y.
        """
        query, key, value, gate = self._project_gated(x)  # Q, K, V and U, after SiLU, [m, h, e]
        # The position scheme is a module that brings order and times into attention. It may change
        # query, key and value, and give a bias. ``apply_hooks`` calls it, and pads the three to
        # blocks [b, h, t, e], with a history in each row.
        q, k, v, bias = self.apply_hooks(query, key, value, batch)

        n = batch.max_length
        if self.training and self.attn_dropout.p > 0:
            # dropout on the weights of the whole batch at once
            block = self.attn_dropout(_compute_weights(q, k, bias, n)) @ v
        else:
            block = _attend_in_chunks(q, k, v, bias, n)

        # the m interactions without the padding, and their heads side by side: [m, d]
        out = batch.unpad(block.transpose(1, 2), align="start").reshape(x.shape)
        out = self.out_dropout(self.gate_norm(out) * gate.reshape(x.shape))
        # f2 is the identity if the option ``output`` is off, which leaves ``dense`` None
        return x + (out if self.dense is None else self.dense(out))

    def _project_gated(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return query, key, value and gate, each SiLU(W LayerNorm(x)) with a W of its own.

        Args:
            x: [m, d] inputs, one for each of the m interactions.

        Returns:
            Four tensors [m, h, e], one row of size e = d / h for each of h heads.
        """
        layers = [*self.projections.values(), self.gate]  # of query, key, value and gate
        product = self.project_jointly(self.LayerNorm(x), layers)  # one product, [m, 4, h, e]
        return F.silu(product).unbind(1)

    def weights(self, x: Tensor, batch: SequenceBatch) -> Tensor:
        """Return HSTU's attention weights A = SiLU(Q K^T + B) / n, for inspection.

        Q and K are query and key, B is the bias of the position scheme, and n is the maximum length
        of a history. HSTU has no softmax: a weight may be negative, and the weights of a query do
        not sum to 1.

        Args:
            x: [m, d] inputs of the sub-layer, one for each interaction.
            batch: the b histories, the longest with t interactions.

        Returns:
            [b, h, t, t] from queries (rows) to keys (columns), 0 at keys newer than the query. Each
            history begins at row and column 0; padding follows it.
        """
        query, key, value, _ = self._project_gated(x)  # [m, h, e] each, after SiLU
        # The position scheme is a module that brings order and times into attention. In
        # ``apply_hooks`` it may change query and key, for example rotate them, and computes the
        # bias. Query and key are then padded to blocks [b, h, t, e]. No weight needs the values.
        q, k, _, bias = self.apply_hooks(query, key, value, batch)
        # SiLU(q k^T + bias) / n, with 0 at keys newer than the query
        return _compute_weights(q, k, bias, n=batch.max_length)


def _compute_weights(q: Tensor, k: Tensor, bias: Tensor | None, n: int) -> Tensor:
    """Return A = SiLU(q k^T + bias) / n, [b, h, t, t], zero for the future (equation 2)."""
    logits = q @ k.transpose(-1, -2)
    logits = logits if bias is None else logits + bias
    return (F.silu(logits) / n).tril()


def _attend_in_chunks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, n: int) -> Tensor:
    """Return (SiLU(q k^T + bias) / n) v, computed for some histories at a time, to save memory.

    Args:
        q, k, v: [b, h, t, e] each, with a history in each row.
        bias: broadcastable to [b, h, t, t], or None.
        n: maximum length of a history.

    Returns:
        [b, h, t, e].
    """
    # All tensors are cut along their first dimension. So a bias [t, t] or [h, t, t], the same for
    # all histories, becomes [1, ..., t, t].
    while bias is not None and bias.dim() < 4:
        bias = bias[None]

    _, h, t, _ = q.shape
    return compute_in_chunks(
        lambda q_c, k_c, v_c, bias_c: _compute_weights(q_c, k_c, bias_c, n) @ v_c,
        tensors=(q, k, v, bias),
        row_elements=h * t * t,  # weights of one history
    )


class GatedAttention(MultiHeadAttention):
    """x + sigmoid(W x) * Attention(Norm(x)), with the hooks of ``hooks.py`` (LiGR)."""

    def __init__(self, options: BlockOptions, position: AttentionPosition) -> None:
        super().__init__(options, position)
        self.gate = nn.Linear(options.hidden_size, options.hidden_size)

    def forward(self, x: Tensor, batch: SequenceBatch) -> Tensor:
        """Return x + sigmoid(W x) * Attention(LayerNorm(x)), [m, d], for inputs x [m, d].

        W x is ``gate``, a linear layer. The product with its sigmoid is element by element.
        """
        out = self.out_dropout(self.attention(self.LayerNorm(x), batch))
        return x + self.gate(x).sigmoid() * out


class GatedFeedForward(nn.Module):
    """x + sigmoid(gate(x)) * W3 (SiLU(W1 n) * W2 n) with n = Norm(x); SwiGLU (Shazeer 2020)."""

    def __init__(self, options: BlockOptions) -> None:
        """Create the layers of x + sigmoid(gate(x)) * W3 (SiLU(W1 n) * W2 n), n = LayerNorm(x).

        Here * multiplies element by element. ``gate`` is a linear layer with a bias. ``dense_1``
        has both W1 and W2, [inner, d] each, and ``dense_2`` has W3, [d, inner], without a bias.

        Args:
            options: sizes and switches of the layer; d is its ``hidden_size``, inner its
                ``inner_size``.
        """
        super().__init__()
        d, inner = options.hidden_size, options.inner_size
        self.dense_1 = nn.Linear(d, 2 * inner, bias=False)  # W1 above W2, for one product
        self.dense_2 = nn.Linear(inner, d, bias=False)  # W3
        self.gate = nn.Linear(d, d)
        self.LayerNorm = nn.LayerNorm(d, eps=options.layer_norm_eps)
        self.dropout = Dropout(options.hidden_dropout_prob)

    def forward(self, x: Tensor) -> Tensor:
        """Return x + sigmoid(gate(x)) * W3 (SiLU(W1 n) * W2 n), [m, d], for inputs x [m, d].

        Here n is LayerNorm(x), and * multiplies element by element. ``dense_1`` computes W1 n and
        W2 n side by side, and ``dense_2`` is W3.
        """
        active, linear = self.dense_1(self.LayerNorm(x)).chunk(2, -1)
        out = self.dropout(self.dense_2(F.silu(active) * linear))
        return x + self.gate(x).sigmoid() * out


# The values of the option ``block``: the sub-layers of a layer, attention and feed-forward network.
BLOCKS: dict[str, tuple[type[MultiHeadAttention], type[nn.Module]]] = {
    "transformer": (MultiHeadAttention, FeedForward),
    "hstu": (PointwiseAttention, nn.Identity),  # no feed-forward network
    "ligr": (GatedAttention, GatedFeedForward),  # does not read ``hidden_act``
}


def build_layer(block: str, options: BlockOptions, position: AttentionPosition) -> TransformerLayer:
    """Build a layer around a position scheme.

    Args:
        block: name in ``BLOCKS`` of the kind of layer.
        options: sizes and switches of the layer.
        position: position scheme inside its attention.
    """
    attention, feed_forward = BLOCKS[block]
    return TransformerLayer(attention(options, position), feed_forward(options))
