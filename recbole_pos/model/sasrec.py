"""PosSASRec: the causal transformer backbone on which every position scheme runs.

Reference:
    Wang-Cheng Kang and Julian McAuley. "Self-Attentive Sequential Recommendation." ICDM 2018.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import ClassVar

from torch import Tensor, nn

from recbole_pos.data.attributes import read_item_attribute
from recbole_pos.data.dataset import Dataset
from recbole_pos.data.interactions import check_clock, require_order
from recbole_pos.errors import UsageError
from recbole_pos.layers.attention import BlockOptions, TransformerEncoder, TransformerLayer
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.dropout import Dropout
from recbole_pos.layers.gated_blocks import HSTULayer, LiGRLayer
from recbole_pos.layers.hooks import AttentionPosition, Dimensions
from recbole_pos.model.base import PosRecommender
from recbole_pos.model.side_features import has_log
from recbole_pos.position.build import build_schemes
from recbole_pos.position.compose import add_positions, find_shortest_period
from recbole_pos.values import Options

BLOCKS = {"transformer": TransformerLayer, "hstu": HSTULayer, "ligr": LiGRLayer}


class PosSASRec(PosRecommender):
    """SASRec with any ``position`` schemes, pre- or post-norm, or HSTU's blocks instead of its own
    (Kang and McAuley, "Self-Attentive Sequential Recommendation", ICDM 2018).

    With ``norm: post``, ``position_from: oldest`` and ``hidden_act: gelu`` it is RecBole's SASRec:
    weights of the latter load strictly and give the same outputs.
    """

    refuses: ClassVar[Mapping[str, str]] = {}

    def __init__(self, config: Options, dataset: Dataset) -> None:
        """Build the schemes and the blocks with them; check the times if a scheme reads times."""
        super().__init__(config, dataset)
        options = BlockOptions.from_config(
            config, bias=config["attention_bias"], output=config["attention_output"]
        )
        d = options.hidden_size
        dimensions = Dimensions(
            max_length=self.max_seq_length,
            hidden_size=d,
            n_heads=options.n_heads,
            initializer_range=self.initializer_range,
            n_layers=config["n_layers"],
            request_time=config["request_time"] == "target",
            attribute=functools.partial(_read_attribute, dataset, self.item_attributes),
        )
        self.dimensions = dimensions
        schemes = build_schemes(config["position"], dimensions, config, has_attention=True)
        self.needs_time = schemes.needs_time
        self.reads_request = dimensions.request_time and schemes.reads_request
        self.position_embedding = schemes.input
        block = self._block(config)
        self.trm_encoder = TransformerEncoder(options, config["n_layers"], schemes.attention, block)
        # of the input with post-norm, of the output with pre-norm (FPARec, equation 9)
        self.LayerNorm = nn.LayerNorm(d, eps=options.layer_norm_eps)
        self.dropout = Dropout(options.hidden_dropout)
        self.pre_norm = options.norm == "pre"
        self.scale = d**0.5 if config["embedding_scale"] else 1.0
        self.init_weights()
        if self.needs_time and has_log(dataset):  # a dataset for serving has no timestamps
            period = find_shortest_period(self)
            self.notices += check_clock(dataset.log, config["timestamp_unit"], period)
            if schemes.assume_order:
                readers = f"position: {', '.join(schemes.assume_order)}"
                require_order(dataset.log, readers, "take a scheme such as time_rope")

    def _block(self, config: Options) -> Callable[[BlockOptions, AttentionPosition], nn.Module]:
        """Return the function that builds a block; it is called once a layer, from the first."""
        block = config["block"]
        if block != "transformer" and config["norm"] != "pre":
            raise UsageError(f"norm: {config['norm']} does not go with block: {block}; use pre")
        return BLOCKS[block]

    def encode(self, items: Tensor, ctx: SequenceContext) -> Tensor:
        """Return the states [m, d] of packed item ids [m]."""
        return self._run_blocks(items, ctx, None)

    def states(self, items: Tensor, ctx: SequenceContext, positions: Tensor | None) -> Tensor:
        """Return the states [k, d] that predict the interaction after each of ``positions``.

        The last block computes its feed-forward network for these positions only.
        """
        # in training dropout must sample all positions, and an overridden ``encode`` must be called
        if self.training or type(self).encode is not PosSASRec.encode:
            return super().states(items, ctx, positions)
        return self._run_blocks(items, ctx, positions)

    def _run_blocks(self, items: Tensor, ctx: SequenceContext, positions: Tensor | None) -> Tensor:
        """Return the states [k, d] at ``positions``, or all of them [m, d] if None."""
        x = self.embed(items, ctx)
        if self.scale != 1:
            x = x * self.scale
        x = add_positions(self.position_embedding, x, ctx)
        if self.pre_norm:
            return self.LayerNorm(self.trm_encoder(self.dropout(x), ctx, positions))
        return self.trm_encoder(self.dropout(self.LayerNorm(x)), ctx, positions)


def _read_attribute(dataset: Dataset, fields: list[str], field: str) -> Tensor:
    """Return the tokens [items, s] of a field of items, and append its name to ``fields``."""
    if field not in fields:
        fields.append(field)
    return read_item_attribute(dataset, field)
