"""PosSASRec, the causal transformer on which every position scheme runs, and models made of it.

Its forward pass is ``layers/forward.py``. PARec, FPARec, KernelAttention and TORoPE are the same
class with other defaults, ``properties/model/<name>.yaml``, above all another ``position``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from recbole_pos.data.dataset import Dataset, read_item_attribute
from recbole_pos.data.interactions import check_clock, require_order
from recbole_pos.errors import UsageError
from recbole_pos.layers.attention import Dropout
from recbole_pos.layers.forward import BlockOptions, TransformerEncoder, encode_by_attention
from recbole_pos.layers.gated_blocks import build_layer
from recbole_pos.layers.hooks import AttentionPosition, Dimensions
from recbole_pos.layers.sequence_batch import SequenceBatch
from recbole_pos.model.base import PosRecommender
from recbole_pos.position.build import Schemes, build_schemes
from recbole_pos.values import Options


class PosSASRec(PosRecommender):
    """SASRec with any ``position`` schemes, pre- or post-norm, or HSTU's blocks instead of its own
    (Kang and McAuley, "Self-Attentive Sequential Recommendation", ICDM 2018).

    With ``norm: post``, ``position_from: oldest``, ``hidden_act: gelu`` and ``embedding_scale:
    False`` it is RecBole's SASRec: weights of the latter load strictly and give the same outputs.
    """

    refuses: ClassVar[Mapping[str, str]] = {}

    def __init__(self, config: Options, dataset: Dataset) -> None:
        """Build the position schemes, the layers and the norm of a transformer.

        A position scheme is a module that tells the model about order or time: it adds an encoding
        to the input, or changes the attention of every layer.

        Args:
            config: options of the model; ``position`` names the position schemes.
            dataset: training part of a dataset. One for serving has no interactions (``has_log``).

        Raises:
            UsageError: if options do not go together, or if the times of the dataset cannot be read
                by the schemes.
        """
        super().__init__(config, dataset)
        # sizes and switches that all layers share
        options = BlockOptions.from_config(
            config, bias=config["attention_bias"], output=config["attention_output"]
        )

        schemes = self._build_schemes(config, dataset)
        self.position_embedding = schemes.input  # encodings that are added to the input
        layers = []
        for number in range(1, config["n_layers"] + 1):
            # each call of ``attention`` builds the schemes of one more layer
            layers.append(self.build_layer(config, options, schemes.attention(), number))
        self.trm_encoder = TransformerEncoder(layers)

        # The norm is applied after the last layer if ``pre_norm``, and else before the first.
        self.pre_norm = options.norm == "pre"
        self.LayerNorm = nn.LayerNorm(options.hidden_size, eps=options.layer_norm_eps)
        self.dropout = Dropout(options.hidden_dropout_prob)  # of the input
        # number by which item vectors are multiplied at the input
        self.scale = options.hidden_size**0.5 if config["embedding_scale"] else 1.0
        self.init_weights()

        # If a scheme reads times, those of the dataset are checked. ``assume_order`` names the
        # schemes for which times must not fall from one interaction of a user to the next.
        if self.needs_time and dataset.has_log:
            self._check_times_of_schemes(dataset, config["timestamp_unit"], schemes.assume_order)

    def _build_schemes(self, config: Options, dataset: Dataset) -> Schemes:
        """Build the position schemes, modules that tell the model about order or time.

        Two attributes of the model are set: ``needs_time``, whether schemes read the times of
        interactions; and ``reads_request``, whether they read the request time, when the next item
        is requested. They have that time only with the option ``request_time: target``. In training
        it is the time of the target, the item to predict.

        Args:
            config: options of the model; ``position`` names the position schemes.
            dataset: training part of a dataset, which has the fields of items that schemes read.

        Returns:
            The encoding of the input (``input``), and what builds the scheme of each layer
            (``attention``).
        """
        has_request_time = config["request_time"] == "target"
        dimensions = Dimensions(
            max_length=self.max_seq_length,
            hidden_size=config["hidden_size"],
            n_heads=config["n_heads"],
            initializer_range=self.initializer_range,
            n_layers=config["n_layers"],
            request_time=has_request_time,
            # a scheme calls it with the name of a field of items, such as their categories
            attribute=lambda field: self._read_item_attribute(dataset, field),
        )
        schemes = build_schemes(config["position"], dimensions, config, has_attention=True)
        self.needs_time = schemes.needs_time
        self.reads_request = has_request_time and schemes.reads_request
        return schemes

    def _read_item_attribute(self, dataset: Dataset, field: str) -> Tensor:
        """Return the tokens [items, s] of a field of items, such as their categories, for a scheme.

        The field is noted in ``item_attributes``: a model with any cannot be given new items later.
        """
        self.item_attributes.add(field)
        return read_item_attribute(dataset, field)

    def _check_times_of_schemes(self, dataset: Dataset, unit: str, assume_order: list[str]) -> None:
        """Check the times of a dataset that position schemes read, and add what is odd to notices.

        Args:
            dataset: training part of a dataset.
            unit: unit of its times.
            assume_order: names of the schemes that need times which never fall along a history.

        Raises:
            UsageError: if nothing can be learned from the times, or they fall where they must not.
        """
        self.notices += check_clock(dataset.log, unit)
        if assume_order:
            readers = f"position: {', '.join(assume_order)}"
            require_order(dataset.log, readers, "take a scheme such as time_rope")

    def build_layer(
        self, config: Options, options: BlockOptions, position: AttentionPosition, number: int
    ) -> nn.Module:
        """Build one layer of the kind that the option ``block`` names: transformer, hstu or ligr.

        Args:
            config: options of the model.
            options: sizes and switches of the layer.
            position: position scheme inside its attention.
            number: number of the layer, from 1. Here all layers are alike; a subclass that
                overrides this method, such as AttrFormer, may build layers that differ.

        Returns:
            The layer.

        Raises:
            UsageError: for ``norm: post`` with hstu or ligr, which have pre-norm only.
        """
        block = config["block"]
        if block != "transformer" and config["norm"] != "pre":
            raise UsageError(f"norm: {config['norm']} does not go with block: {block}; use pre")
        return build_layer(block, options, position)

    def encode(self, batch: SequenceBatch) -> Tensor:
        """Return the states [k, d] of the batch's queries, see ``layers/forward.py``."""
        return encode_by_attention(self, batch)


class PARec(PosSASRec):
    """Positional attention with one learned [n, n] matrix per layer (Luo et al.,
    "Learning Positional Attention for Sequential Recommendation", 2024, equation 6).

    The class is PosSASRec with ``position: [learned, parec]``, pre-norm, ReLU and no query, key or
    output projection. Learned input positions are in the authors' public code, not in the paper.

    =========== ===================================================================
    equation    code
    =========== ===================================================================
    5, 6        ``PositionMatrix`` in ``position/positional_attention.py``
    7           ``FactorizedPositionMatrix``, same file
    8 to 11     ``layers/forward.py``, steps 4 to 7
    12 to 15    ``FixedPattern`` and its subclasses, with ``position/positional_attention.py``
    =========== ===================================================================

    Reference:
        Fan Luo, Juan Zhang, Shenghui Xu. "Learning Positional Attention for Sequential
        Recommendation." 2024 (arXiv 2407.02793).
    """


class FPARec(PosSASRec):
    """Positional attention with the matrix factorized into two [n, k] factors (Luo et al.,
    "Learning Positional Attention for Sequential Recommendation", 2024, equation 7).

    The class is PosSASRec with ``position: [learned, fparec]``; the rest is as in :class:`PARec`.
    """


class KernelAttention(PosSASRec):
    """Single-head transformer with a positional kernel on logits and values (Nabiev and Frolov,
    "Position-Aware Sequential Attention for Accurate Next Item Recommendations", 2026,
    equation 9).

    The class is PosSASRec with ``position: [kernel]``, one head and ``embedding_scale: True``.
    Baselines of the paper have another ``position``: nope, learned (Classic), rope and cape. Table
    4's variants are ``kernel_u``, ``kernel_l``, ``kernel_u_shared`` and ``kernel_l_shared``.
    Fine-tuning only the kernel of a trained model (section 6.1) is ``recbole-pos attach``.

    =========== ===================================================================
    equation    code
    =========== ===================================================================
    1           ``MultiHeadAttention`` in ``layers/forward.py``
    section 2.3 ``LearnedPosition`` in ``position/additive.py`` (the Classic baseline)
    6 to 9      ``PositionalKernel`` in ``position/kernel.py``
    10, 11      ``Factor``, ``ToeplitzFactor``, ``FullFactor``, same file
    =========== ===================================================================

    Reference:
        Timur Nabiev, Evgeny Frolov. "Position-Aware Sequential Attention for Accurate Next Item
        Recommendations." 2026 (arXiv 2602.21052).
    """


class TORoPE(PosSASRec):
    """Pre-norm decoder (GPT-2 style) whose heads turn by order and by time (Wei et al., "Rotate
    Both Ways: Time-and-Order RoPE for Generative Recommendation", 2025, equation 4).

    The class is PosSASRec with ``position: [to_rope]``. Baselines of Tables 3 and 4 have another
    ``position``: [learned] (index APE), [learned, time_learned] (and time APE), [hstu] (relative
    bias), [rope], [time_rope], and [rope, time_learned].

    =========== ===================================================================
    equation    code
    =========== ===================================================================
    1           ``rotate_pairs`` in ``position/rotary.py``
    2           ``RotaryPosition``, same file (index-only RoPE)
    3, sec. 3.2 ``base_form``, ``wavelength_form`` in ``position/rotary.py``;
                ``TimeRotaryPosition`` in ``position/time_rotary.py`` (time-only RoPE)
    4, 5, 6     ``TimeOrderRotaryPosition``, same file; 5 and 6 are ``fusion: early``
    9, sec. 4.3 same class, ``fusion: split_dim``; section 4.4: ``split_head``
    =========== ===================================================================

    Reference:
        Xiaokai Wei, Jiajun Wu, Daiyao Yi, Reza Shirkavand, Michelle Gong. "Rotate Both Ways:
        Time-and-Order RoPE for Generative Recommendation." 2025 (arXiv 2510.20455).
    """
