"""A generated shop with attributes of every kind, many of them missing, and their relations."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.experiment.build import Experiment, prepare
from recbole_pos.relations.search import Edges, EventOrder, PackedSequences

RELATIONS: list[Any] = [
    "brand",
    {"field": "tags"},
    {"field": "price", "within": "brand", "scales": [1.0, 5.0]},
    {"field": "weight", "scales": 3},
    "channel",
    {"field": "stars", "scales": [2.0]},
    "time",
    "position",
    "country",
    {"field": "age", "scales": [10.0]},
]
LOAD = {
    "inter": ["user_id", "item_id", "timestamp", "channel", "stars"],
    "item": ["item_id", "brand", "tags", "price", "weight"],
    "user": ["user_id", "country", "age"],
}
SIZES: dict[str, Any] = {"hidden_size": 8, "inner_size": 8, "n_layers": 3, "n_heads": 2}
SIZES |= {"relation_heads": 3, "relation_size": 4, "top_k": 4, "MAX_ITEM_LIST_LENGTH": 5}
SIZES |= {"train_batch_size": 4, "eval_batch_size": 6, "hidden_dropout_prob": 0.0}
SIZES |= {"topk": [3], "valid_metric": "NDCG@3", "show_progress": False}


def maybe(rng: np.random.Generator, value: Any) -> Any:
    """The value, or nothing."""
    return "" if rng.random() < 0.2 else value


def tables(seed: int = 0, users: int = 14, items: int = 20) -> dict[str, pd.DataFrame]:
    """Columns as in atomic files; few distinct values, so that ties are everywhere."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 16, users)
    lengths[:3] = [1, 3, 4]
    n = int(lengths.sum())
    inter = {
        "user_id:token": np.repeat([f"u{u}" for u in range(users)], lengths),
        "item_id:token": [f"i{i}" for i in rng.integers(0, items, n)],
        "timestamp:float": 1.5e9 + 3600 * rng.integers(0, 40, n),
        "channel:token": [maybe(rng, c) for c in rng.choice(["web", "app"], n)],
        "stars:float": [maybe(rng, float(s)) for s in rng.integers(1, 6, n)],
    }
    item = {
        "item_id:token": [f"i{i}" for i in range(items)],
        "brand:token": [maybe(rng, b) for b in rng.choice(list("ABC"), items)],
        "tags:token_seq": [
            " ".join(rng.choice(list("pqrst"), rng.integers(0, 4))) for _ in range(items)
        ],
        "price:float": [maybe(rng, float(p)) for p in rng.integers(1, 8, items)],
        "weight:float": [maybe(rng, float(w)) for w in rng.integers(1, 90, items)],
    }
    user = pd.DataFrame(
        {
            "user_id:token": [f"u{u}" for u in range(users)],
            "country:token": [maybe(rng, c) for c in rng.choice(["x", "y"], users)],
            "age:float": [maybe(rng, float(a)) for a in rng.integers(20, 40, users)],
        }
    )
    user.loc[2, ["country:token", "age:float"]] = ""
    inter, item = pd.DataFrame(inter), pd.DataFrame(item)
    return {"inter": inter.sample(frac=1, random_state=1), "item": item[:-1], "user": user}


def write(folder: Path, made: dict[str, pd.DataFrame]) -> Path:
    """folder/shop/shop.*; returns folder."""
    (folder / "shop").mkdir(parents=True, exist_ok=True)
    for suffix, table in made.items():
        table.to_csv(folder / "shop" / f"shop.{suffix}", sep="\t", index=False)
    return folder


def shop_options(folder: Path, **options: Any) -> dict[str, Any]:
    """Those of AttrFormer on the shop, small."""
    data = {"data_path": str(folder), "load_col": LOAD, "filter_inter_by_user_or_item": False}
    return {**SIZES, **data, "relations": RELATIONS, **options}


def open_shop(folder: Path, **options: Any) -> Experiment:
    """AttrFormer on the shop, small."""
    return prepare(PosConfig("AttrFormer", "shop", None, shop_options(folder, **options)))


def train(folder: Path, run_dir: Path, **options: Any) -> Any:
    """A short run of AttrFormer on the shop, kept in ``run_dir``."""
    given = shop_options(folder, **{"epochs": 3, **options})
    return recbole_pos.run("AttrFormer", "shop", None, given, run_dir=run_dir, verbose=False)


class Cells:
    """Attributes from the atomic files, by RecBole's ids."""

    def __init__(self, dataset: Any, made: dict[str, pd.DataFrame]) -> None:
        self.dataset = dataset
        self.rows = {
            key: table.rename(columns=lambda c: c.split(":")[0]).set_index(f"{key}_id")
            for key, table in made.items()
            if key != "inter"
        }
        inter = made["inter"].rename(columns=lambda c: c.split(":")[0])
        names = dataset.field2id_token["user_id"].tolist()
        inter["place"] = inter["user_id"].map(names.index)
        self.inter = inter.sort_values(["place", "timestamp"], kind="stable", ignore_index=True)

    def of(self, table: str, number: int, field: str) -> Any:
        """A cell, or None where it is empty or the thing has no row."""
        if table == "inter":
            value = self.inter[field][number]
        else:
            name = self.dataset.field2id_token[f"{table}_id"][number]
            if name not in self.rows[table].index:
                return None
            value = self.rows[table][field][name]
        return None if value == "" else value


def similarity(a: Any, b: Any, scales: tuple[float, ...]) -> float:
    """Equation 10 for two cells; a missing one is related to nothing."""
    if a is None or b is None:
        return 0.0
    if isinstance(a, float):
        return sum(math.exp(-abs(a - b) / s) for s in scales) / len(scales)
    return float(len(set(a.split()) & set(b.split())))


def shaken(made: Experiment) -> Any:
    """The model in float64, far from its start, in evaluation mode: its clock is then fixed."""
    model = made.model.double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.6)
    return model


def all_windows(made: Experiment) -> PackedSequences:
    """Every training window of the shop as one batch."""
    loader = made.trainer.training_loader(made.loaders["train"])
    batch = loader.gather(np.concatenate(loader._get_batches()))
    return made.model.locate(batch)


def encode(model: Any, rows: PackedSequences) -> torch.Tensor:
    """The states [m, d] of packed rows that read each other."""
    return model.encode(model.gather(rows, None, model.lookup))


def places(rows: PackedSequences) -> np.ndarray:
    """[m] the place of each event in its window, counted from the oldest."""
    return np.concatenate([np.arange(length) for length in rows.lengths])


def find(model: Any, rows: PackedSequences) -> tuple[EventOrder, list[Edges], Edges | None]:
    """The relations that the model itself finds for the rows, in evaluation mode."""
    order = model.lookup.make_order(rows, np.random.default_rng(model.seed))
    return order, *model.lookup.find(rows, order)
