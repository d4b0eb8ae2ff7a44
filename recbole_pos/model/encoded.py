"""EncodedSTAMP and EncodedSASRec: RecBole's STAMP and SASRec with encodings of ``position``.

Reference:
    Ruihong Qiu, Zi Huang, Tong Chen, Hongzhi Yin. "Exploiting Positional Information for
    Session-based Recommendation." ACM Transactions on Information Systems 2021, Table 3.

Both are RecBole's classes with another embedding at the input, which adds P to the items of a
session and to nothing else:

- STAMP has no positions; with ``position: [nope]`` it is RecBole's.
- SASRec learns a vector for each place from the start, which ``position`` replaces; with ``[lpe]``
  it is RecBole's.

RecBole's STAMP starts with a small random vector for padding, which it never trains and adds up
over a row; here it is zero, or scores would depend on the width of a batch.
"""

from __future__ import annotations

from typing import Any

import torch
from recbole.data.interaction import Interaction
from recbole.model.sequential_recommender.sasrec import SASRec
from recbole.model.sequential_recommender.stamp import STAMP
from torch import Tensor, nn

from recbole_pos.data.protocols import Dataset
from recbole_pos.layers.context import trimmed
from recbole_pos.layers.hooks import Dimensions
from recbole_pos.position.build import row_encodings
from recbole_pos.values import Options


class EncodedEmbedding(nn.Embedding):
    """Item vectors, with P added where items stand in a session.

    A table of items, [B, L] padded on the right, is sessions and becomes x + P, zero at padding. A
    list of items, as candidates are, becomes x.

    Args:
        plain: item vectors, whose table is taken over; the row of padding becomes zero.
        schemes: input encodings with ``rows``.
    """

    def __init__(self, plain: nn.Embedding, schemes: nn.ModuleList) -> None:
        super().__init__(plain.num_embeddings, plain.embedding_dim, 0, _weight=plain.weight.data)
        self.schemes = schemes
        with torch.no_grad():
            self.weight[0] = 0

    def forward(self, items: Tensor) -> Tensor:
        x = super().forward(items)
        encodings: list[Any] = [scheme for scheme in self.schemes if hasattr(scheme, "rows")]
        if items.dim() < 2 or not encodings:
            return x
        real = items > 0
        place = torch.arange(items.size(1), device=items.device).expand_as(items)
        newer = (real.sum(1, keepdim=True) - 1 - place).clamp(min=0)
        for scheme in encodings:
            x = x + scheme.rows(place, newer, place + newer + 1) * real[:, :, None]
        return x


class Silent(nn.Module):
    """Stands where a model looks its own positions up, and adds nothing."""

    def forward(self, places: Tensor) -> float:
        """Zero for all places."""
        return 0.0


def trim_rows(self: Any, rows: Interaction) -> Interaction:
    """Rows of the host, before they go to a device, without the columns no history reaches.

    A method of models whose states do not depend on the width of a batch.
    """
    items = trimmed(rows[self.ITEM_SEQ], rows[self.ITEM_SEQ_LEN])
    return Interaction({**rows.interaction, self.ITEM_SEQ: items})


class EncodedSTAMP(STAMP):
    """RecBole's STAMP with encodings of positions added to the session's items (Qiu et al.,
    "Exploiting Positional Information for Session-based Recommendation", TOIS 2021, Table 3)."""

    item_embedding: nn.Embedding
    pack_rows = trim_rows

    def __init__(self, config: Options, dataset: Dataset) -> None:
        super().__init__(config, dataset)
        schemes = _schemes(config, self.max_seq_length, self.embedding_size)
        self.item_embedding = EncodedEmbedding(self.item_embedding, schemes)

    def forward(self, item_seq: Tensor, item_seq_len: Tensor) -> Tensor:
        """[B, L] histories to [B, d]."""
        return super().forward(trimmed(item_seq, item_seq_len, self.training), item_seq_len)


class EncodedSASRec(SASRec):
    """RecBole's SASRec with other encodings of positions than its own (Qiu et al.,
    "Exploiting Positional Information for Session-based Recommendation", TOIS 2021, Table 3)."""

    item_embedding: nn.Embedding
    pack_rows = trim_rows

    def __init__(self, config: Options, dataset: Dataset) -> None:
        super().__init__(config, dataset)
        schemes = _schemes(config, self.max_seq_length, self.hidden_size)
        self.item_embedding = EncodedEmbedding(self.item_embedding, schemes)
        self.position_embedding = Silent()

    def forward(self, item_seq: Tensor, item_seq_len: Tensor) -> Tensor:
        """[B, L] histories to [B, d]."""
        return super().forward(trimmed(item_seq, item_seq_len, self.training), item_seq_len)


def _schemes(config: Options, max_length: int, d: int) -> nn.ModuleList:
    dimensions = Dimensions(
        max_length=max_length,
        hidden_size=d,
        n_heads=1,
        initializer_range=config["initializer_range"],
    )
    return row_encodings(config["position"], dimensions, config)
