"""The forward pass, from the items of a batch to its loss: the one file to read from the top.

A batch has m interactions of b histories, packed, the longest of length t (``sequence_batch.py``).
E [items, d] are the item vectors, h heads have e = d / h columns each.

    (1)  x  = E[item] + P                                     input          [m, d]
    (2)  a  = x + heads(LayerNorm(x)) W_O + b_O               every layer    [m, d]
    (3)  o  = softmax( M + B + (R q) (U^T R k)^T / sqrt(e) ) L v     every head   [m, h, e]
    (4)  x' = a + act(LayerNorm(a) W_1 + b_1) W_2 + b_2       every layer    [m, d]
    (5)  s  = LayerNorm(x) of the rows that predict           states         [rows, d]
    (6)  z  = s E^T                                           scores         [rows, items]
    (7)  loss = mean of -log softmax(z)[target]                              scalar

q, k and v are LayerNorm(x) times W_Q, W_K and W_V, plus a bias each. P, R, U, B and L are the hooks
of position schemes (``hooks.py``), by default zero or the identity: P is added to the input, R
rotates query and key, U mixes keys and L values with older interactions, B adds a bias to the dot
products over sqrt(e). M hides newer interactions. Below, a row that predicts is a query, too.
This is with ``norm: pre``; ``post`` normalises sums instead. Modules carry RecBole's names
(``query``, ``dense``, ...), so weights of its SASRec load strictly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recbole_pos.layers.attention import Dropout, make_mask, masked_attention
from recbole_pos.layers.hooks import AttentionPosition, Projected, add_positions, require_result
from recbole_pos.layers.sequence_batch import SequenceBatch
from recbole_pos.values import Options


def compute_loss(model: Any, batch: SequenceBatch) -> Tensor:
    """Return the loss of a batch: encode its queries, and compare the states with their targets.

    A query asks for what follows one of the interactions; its target is the item that did.

    Args:
        model: a :class:`~recbole_pos.model.base.PosRecommender`.
        batch: histories with queries and a target item for each.

    Returns:
        Scalar; by default the cross-entropy of the targets among all items. With
        ``model.later_targets`` the next few items after a query are its targets.
    """
    with model.shared_items() as item_vectors:  # [items, d], computed once for input and scores
        states = encode_queries(model, batch)  # [queries, d]

        # Some models predict the next few items. They find them in the dataset, where the batch's
        # interactions have the row numbers ``log_rows``.
        if model.later_targets is not None and batch.log_rows is not None:
            return model.compare_with_later_targets(states, item_vectors, batch)

        # the vectors of the items that the loss chooses among, by default all, and the indices of
        # the targets among them
        candidates, targets = model.training_candidates(item_vectors, batch.targets)
        return model.loss(states, candidates, targets)


def encode_queries(model: Any, batch: SequenceBatch) -> Tensor:
    """Encode the queries of a batch by a model's ``encode``, and check what that returns.

    A query asks for what follows one of the interactions. Its state is compared with item vectors.

    Args:
        model: a :class:`~recbole_pos.model.base.PosRecommender`, which may be a user's own.
        batch: histories with queries.

    Returns:
        [queries, d].

    Raises:
        UsageError: if the ``encode`` of a custom model returns anything else.
    """
    weight = model.item_embedding.weight
    shape = batch.num_queries, model.item_embedding.embedding_dim
    return require_result(model.encode(batch), weight.dtype, shape, model, "encode")


def encode_by_attention(model: Any, batch: SequenceBatch) -> Tensor:
    """Encode a batch by a causal transformer: item vectors, positions, then all layers.

    A query asks for what follows one of the interactions: only states at queries are returned.

    Args:
        model: a ``PosSASRec``, with its layers, layer norm and position schemes.
        batch: histories with queries.

    Returns:
        [queries, d] states at the queries, which predict the next item.
    """
    x = model.embed(batch)  # E[items], with features of interactions and users, [m, d]
    if model.scale != 1:
        x = x * model.scale  # sqrt(d), for embedding_scale
    x = add_positions(model.position_embedding, x, batch)  # + P

    # the last layer needs its feed-forward network at the queries only, but in training dropout
    # must draw the same numbers for every choice of queries
    queries = None if model.training else batch.queries
    if model.pre_norm:
        states = model.LayerNorm(model.trm_encoder(model.dropout(x), batch, queries))
    else:
        states = model.trm_encoder(model.dropout(model.LayerNorm(x)), batch, queries)
    return batch.take_queries(states) if queries is None else states


class TransformerEncoder(nn.Module):
    """A stack of layers, each with a position scheme of its own (steps 2 to 4, once a layer)."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layer = nn.ModuleList(layers)

    def forward(self, x: Tensor, batch: SequenceBatch, queries: Tensor | None = None) -> Tensor:
        """Apply all layers to x [m, d]; return all states, or those at packed ``queries``."""
        *first, last = self.layer
        for layer in first:
            # only the last layer may leave out states: those between are read by the layer above
            x = layer(x, batch)
        return last(x, batch) if queries is None else last(x, batch, queries)


class TransformerLayer(nn.Module):
    """One layer: attention, then a feed-forward network, each with its residual (steps 2 to 4)."""

    def __init__(self, attention: nn.Module, feed_forward: nn.Module) -> None:
        """Keep the two sub-layers.

        Args:
            attention: the sub-layer in which interactions read each other, with its residual.
            feed_forward: the network that changes each state by itself, with its residual.
        """
        super().__init__()
        self.multi_head_attention = attention
        self.feed_forward = feed_forward

    def forward(self, x: Tensor, batch: SequenceBatch, queries: Tensor | None = None) -> Tensor:
        """Apply the layer to x [m, d]; return all states, or those at packed ``queries``."""
        x = self.multi_head_attention(x, batch)
        return self.feed_forward(x if queries is None else x[queries])


class MultiHeadAttention(nn.Module):
    """Multi-head attention sub-layer with residual, layer norm and one position scheme (2, 3).

    The scheme also names the projections that the layer needs.
    """

    def __init__(self, options: BlockOptions, position: AttentionPosition) -> None:
        """Create the linear layers of attention, with a layer norm and dropout.

        They compute query, key and value, and the output (``dense``), d numbers each. A position
        scheme is a module that changes attention by the order or the times of interactions. It may
        need only some of query, key and value; the layers of the others are None.

        Args:
            options: sizes and switches of the layer.
            position: the position scheme, whose ``projections`` name those among query, key and
                value that it needs.
        """
        super().__init__()
        d, bias = options.hidden_size, options.bias
        self.n_heads = options.n_heads
        self.head_size = d // options.n_heads
        names = position.projections
        self.query = nn.Linear(d, d, bias=bias) if "query" in names else None
        self.key = nn.Linear(d, d, bias=bias) if "key" in names else None
        self.value = nn.Linear(d, d, bias=bias) if "value" in names else None
        self.dense = nn.Linear(d, d, bias=bias) if options.output else None
        self.position = position
        self.LayerNorm = nn.LayerNorm(d, eps=options.layer_norm_eps)
        self.out_dropout = Dropout(options.hidden_dropout_prob)
        self.attn_dropout = Dropout(options.attn_dropout_prob)
        self.pre_norm = options.norm == "pre"
        self.causal = options.causal

    def forward(self, x: Tensor, batch: SequenceBatch) -> Tensor:
        """Return a = x + heads(LayerNorm(x)) W_O + b_O, [m, d] (step 2)."""
        out = self.attention(self.LayerNorm(x) if self.pre_norm else x, batch)
        out = x + self.out_dropout(out)
        return out if self.pre_norm else self.LayerNorm(out)

    def attention(self, x: Tensor, batch: SequenceBatch) -> Tensor:
        """Return the output of attention, heads(x) W_O + b_O, before the residual is added.

        The position scheme, a module that knows order and times, may compute attention itself
        (``attend``, which otherwise returns None). If it does not, ``apply_hooks`` lets it change
        query, key and value and give a bias, and ``masked_attention`` computes the softmax and the
        mean.

        Args:
            x: [m, d] inputs, one for each of the m interactions, history after history.
            batch: the b histories, the longest with t interactions.

        Returns:
            [m, d].
        """
        query, key, value = self.project(x)  # [m, h, e] each: h heads of size e = d / h
        out = self.position.attend(query, key, value, batch, self.attn_dropout)  # the same, or None
        if out is None:
            # in blocks [b, h, t, e], with a history in each row, padded at its end
            q, k, v, bias = self.apply_hooks(query, key, value, batch)
            block = masked_attention(q, k, v, bias, batch, self.causal, self.attn_dropout)
            # ``unpad`` takes the m interactions out of [b, t, h, e], without the padding
            out = batch.unpad(block.transpose(1, 2), align="start")
        out = out.reshape(x.shape)  # heads side by side: [m, h, e] to [m, d]
        return out if self.dense is None else self.dense(out)

    def project(self, x: Tensor) -> tuple[Projected, Projected, Tensor]:
        """Compute the query, key and value of every head, as far as there are layers for them.

        A position scheme may do without some of the three, and then they have no linear layer.

        Args:
            x: [m, d] inputs.

        Returns:
            Query, key and value, [m, h, e] each: h heads of e = d / h columns. Without its layer
            the query or key is None, and the value is x itself, cut into heads.
        """
        projected: dict[str, Tensor] = {}
        layers = self.projections  # linear layers by name: query, key and value, or some of them
        if layers:
            joint = self.project_jointly(x, list(layers.values()))  # [m, layers, h, e]
            projected = dict(zip(layers, joint.unbind(1), strict=True))
        inputs = x.view(x.size(0), self.n_heads, self.head_size)
        return projected.get("query"), projected.get("key"), projected.get("value", inputs)

    @property
    def projections(self) -> dict[str, nn.Linear]:
        """The layers among query, key and value that the scheme needs, by name, in this order."""
        layers = {"query": self.query, "key": self.key, "value": self.value}
        return {name: layer for name, layer in layers.items() if layer is not None}

    def project_jointly(self, x: Tensor, layers: list[nn.Linear]) -> Tensor:
        """Apply several linear layers of the same sizes to the same inputs, in one matrix product.

        Their weights [d, d] are put one below the other, which is faster than one product each.

        Args:
            x: [m, d] inputs.
            layers: such as those of query, key and value; all with a bias or all without.

        Returns:
            [m, layers, h, e], each output cut into h heads of size e = d / h.
        """
        weight = torch.cat([layer.weight for layer in layers])
        bias = torch.cat([layer.bias for layer in layers]) if layers[0].bias is not None else None
        return F.linear(x, weight, bias).view(-1, len(layers), self.n_heads, self.head_size)

    def apply_hooks(
        self, query: Tensor, key: Tensor, value: Tensor, batch: SequenceBatch
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Let the position scheme change query, key and value, and pad them for dot products.

        The position scheme is a module that brings order and times into attention. It has four
        hooks, each of which may be left as it is, and then changes nothing:

        - ``rotate`` turns query and key by angles that depend on the position or the time
        - ``mix_keys`` replaces each key by a mixture of itself and the older keys of its history
        - ``mix_values`` does the same with the values
        - ``bias`` returns numbers to add to the dot products of queries and keys, or None. It gets
          query and key after the other hooks, since some schemes compute the bias from them.

        Args:
            query, key, value: [m, h, e] each: for the m interactions of all histories, one history
                after the other, h heads of e numbers.
            batch: the b histories, the longest with t interactions.

        Returns:
            Query, key and value after the hooks, each as a block [b, h, t, e] with a history in
            each row and zeros behind it; and the bias, broadcastable to [b, h, t, t], or None.
        """
        position = self.position
        query, key = position.rotate(query, key, batch)
        key, value = position.mix_keys(key, batch), position.mix_values(value, batch)
        # ``pad`` makes a block [b, t, h, e] of [m, h, e], and ``transpose`` [b, h, t, e]
        q, k, v = (batch.pad(x, align="start").transpose(1, 2) for x in (query, key, value))
        return q, k, v, position.bias(q, k, batch)

    def weights(self, x: Tensor, batch: SequenceBatch) -> Tensor:
        """Return the attention weights softmax(q k^T / sqrt(e) + bias), for inspection.

        q, k and the bias come from ``apply_hooks``: the position scheme, a module that brings order
        and times into attention, may change query and key and may give a bias. Hidden keys get the
        logit -inf, hence the weight 0: padding, and if ``causal`` the keys newer than the query.

        In training :func:`~recbole_pos.layers.attention.masked_attention` computes the same weights
        and their product with the values, without keeping them.

        Args:
            x: [m, d] inputs of the sub-layer, one for each of m interactions.
            batch: the b histories of these interactions, the longest with t of them.

        Returns:
            [b, h, t, t] from queries (rows) to keys (columns), for each of h heads. Each history
            begins at row and column 0.
        """
        query, key, value = self.project(self.LayerNorm(x) if self.pre_norm else x)
        q, k, _, bias = self.apply_hooks(query, key, value, batch)  # q and k: [b, h, t, e]
        logits = q @ k.transpose(-1, -2) / q.size(-1) ** 0.5
        logits = logits if bias is None else logits + bias
        return logits.masked_fill(make_mask(batch, self.causal), -torch.inf).softmax(-1)


# The values of the option ``hidden_act``, as in RecBole.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "swish": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


class FeedForward(nn.Module):
    """Position-wise feed-forward sub-layer with residual and layer norm (4; FPARec, equation 8)."""

    def __init__(self, options: BlockOptions) -> None:
        """Create a network of two linear layers, from d numbers to ``inner_size`` and back to d.

        A layer norm, before them (``pre_norm``) or at the end, and dropout belong to it.

        Args:
            options: sizes and switches of the layer.
        """
        super().__init__()
        self.dense_1 = nn.Linear(options.hidden_size, options.inner_size)
        self.dense_2 = nn.Linear(options.inner_size, options.hidden_size)
        self.LayerNorm = nn.LayerNorm(options.hidden_size, eps=options.layer_norm_eps)
        self.dropout = Dropout(options.hidden_dropout_prob)
        self.activation = ACTIVATIONS[options.hidden_act]
        self.pre_norm = options.norm == "pre"

    def forward(self, a: Tensor) -> Tensor:
        """Return a + act(LayerNorm(a) W_1 + b_1) W_2 + b_2, [m, d] (step 4)."""
        hidden = self.LayerNorm(a) if self.pre_norm else a
        out = a + self.dropout(self.dense_2(self.activation(self.dense_1(hidden))))
        return out if self.pre_norm else self.LayerNorm(out)


def score_items(states: Tensor, item_vectors: Tensor) -> Tensor:
    """Return the scores z = s E^T [queries, items] (step 6; FPARec, equation 10)."""
    return states @ item_vectors.t()


@dataclass(frozen=True, kw_only=True)
class BlockOptions:
    """Sizes and switches of a layer.

    Attributes:
        hidden_size: d.
        inner_size: inner size of the feed-forward network.
        n_heads: h, a divisor of d.
        hidden_dropout_prob: dropout on sub-layer outputs.
        attn_dropout_prob: dropout on attention weights. In dot-product attention any value above 0
            rules out torch's fused kernel: on CPU attention is then slower, most for long windows.
        hidden_act: name in ``ACTIVATIONS`` of the feed-forward network's activation.
        norm: ``pre`` normalises the input of a sub-layer, ``post`` the sum with the residual.
        bias: whether query, key and value have a bias.
        output: whether a linear layer (``dense``) follows the heads.
        layer_norm_eps: epsilon of the layer norms.
        causal: whether an interaction sees only itself and older ones, or all of its history.
    """

    hidden_size: int
    inner_size: int
    n_heads: int
    hidden_dropout_prob: float
    attn_dropout_prob: float
    hidden_act: str
    norm: str
    layer_norm_eps: float
    bias: bool
    output: bool
    causal: bool = True

    @classmethod
    def from_config(cls, config: Options, **fixed: Any) -> BlockOptions:
        """Return the sizes and switches of a model's layers, the fields of this class.

        Args:
            config: the model's options, which have the same names as the fields.
            **fixed: values of the fields that are no options: ``bias`` and ``output`` always, and
                ``causal`` if it is not True, its default.
        """
        names = [x.name for x in fields(cls) if x.name not in ("causal", *fixed)]
        return cls(**{name: config[name] for name in names}, **fixed)
