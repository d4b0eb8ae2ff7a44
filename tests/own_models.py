"""Models and schemes as a person writes them, and their options."""

from pathlib import Path

import yaml

SMALL = {"epochs": 1, "show_progress": False, "MAX_ITEM_LIST_LENGTH": 12}
# A module as a person writes one: a model, a model in RecBole's form, and a scheme.
MODULE = '''
import recbole_pos
import torch
from recbole.model.abstract_recommender import SequentialRecommender
from recbole.model.loss import BPRLoss
from torch import nn


class TinyGRU(recbole_pos.PosRecommender):
    """A GRU over the history."""

    def __init__(self, config, dataset):
        super().__init__(config, dataset)
        d = config["hidden_size"]
        self.gru = nn.GRU(d, d * config["gru_width"])
        self.back = nn.Linear(d * config["gru_width"], d)
        self.init_weights()

    def encode(self, batch):
        x = batch.pad(self.item_embedding(batch.items), "start").transpose(0, 1)
        states = self.back(batch.unpad(self.gru(x)[0].transpose(0, 1), "start"))
        return batch.take_queries(states)


class Markov(SequentialRecommender):
    """The last item alone, in RecBole's form."""

    defaults = {"state_size": 8, "loss_type": "BPR", "norm": "l2"}

    def __init__(self, config, dataset):
        super().__init__(config, dataset)
        assert config["norm"] in ("l1", "l2")
        self.items = nn.Embedding(self.n_items, config["state_size"], padding_idx=0)
        self.next = nn.Embedding(self.n_items, config["state_size"], padding_idx=0)

    def forward(self, rows):
        last = rows[self.ITEM_SEQ_LEN] - 1
        return self.items(rows[self.ITEM_SEQ].gather(1, last[:, None])[:, 0])

    def calculate_loss(self, interaction):
        items = (interaction[self.POS_ITEM_ID], interaction[self.NEG_ITEM_ID])
        return BPRLoss()(*((self(interaction) * self.next(item)).sum(-1) for item in items))

    def predict(self, interaction):
        return (self(interaction) * self.next(interaction[self.ITEM_ID])).sum(-1)

    def full_sort_predict(self, interaction):
        return self(interaction) @ self.next.weight.T


class Recency(recbole_pos.AttentionPosition):
    """Logits fall with distance."""

    options = ("recency_slope",)

    def __init__(self, dimensions, *, recency_slope):
        super().__init__()
        self.slope = nn.Parameter(torch.full((dimensions.n_heads, 1, 1), recency_slope))

    def bias(self, q, k, ctx):
        position = torch.arange(ctx.width, device=q.device)
        return -self.slope * (position[:, None] - position[None, :]).clamp(min=0)
'''
REGISTER = """
recbole_pos.register_model(TinyGRU, defaults={"gru_width": 2})
recbole_pos.register_scheme("recency", Recency, defaults={"recency_slope": 1.0})
"""
GRU = {"gru_width": 2}


def options(tiny: Path, **more) -> dict:
    return {**SMALL, "data_path": str(tiny), **more}


def config_of(result) -> dict:
    return yaml.safe_load(Path(result.run_dir, "config.yaml").read_text())
