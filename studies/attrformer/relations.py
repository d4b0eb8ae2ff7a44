"""What each relation of a trained AttrFormer reads, and how much it adds.

    python studies/attrformer/relations.py RUN_DIR

Of one training batch without dropout it prints: ``read``, relations of an interaction that are
kept, at most top_k; ``others``, the share of them that lead to other users; ``adds``, the size of
what a relation adds to the attention of a layer, self-attention being 1; ``W^R``, its weights in
the heads, as in equation 8. Below stands the gate of each layer, the weight of the states of like
users.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch

import recbole_pos as rp
from recbole_pos.model.attrformer import AttrFormer
from recbole_pos.relations.lookup import PackedSequences


@torch.no_grad()
def measure(model: AttrFormer, rows: PackedSequences) -> pd.DataFrame:
    """Return a line for each relation of the heads; layers count from 1."""
    order = model.lookup.make_order(rows, np.random.default_rng(model.seed))
    edges, _ = model.lookup.find(rows, order)
    others = [np.mean(order.user[edge.reader] != order.user[edge.source]) for edge in edges]
    names = [relation.field for relation in model.declared if not relation.is_of_users]
    columns = {"read": [len(edge.value) / len(order) for edge in edges], "others": others}
    table = pd.DataFrame(columns, index=names)
    layers = [layer.multi_head_attention for layer in model.trm_encoder.layer]
    calls: list[tuple] = []  # of the layers: inputs [m, d] and their batch
    hooks = [x.register_forward_pre_hook(lambda _, args: calls.append(args)) for x in layers]
    model.encode(model.gather(rows, None, model.lookup))
    for hook in hooks:
        hook.remove()
    for number, (layer, (x, batch)) in enumerate(zip(layers, calls, strict=True), 1):
        x = layer.LayerNorm(x) if layer.pre_norm else x
        weights = layer.relation_mix.clone()  # W^R [relations, heads]
        layer.relation_mix.zero_()
        alone = layer.attention(x, batch)
        adds = []
        for relation, weight in enumerate(weights):
            layer.relation_mix[relation] = weight
            adds.append(float((layer.attention(x, batch) - alone).norm() / alone.norm()))
            layer.relation_mix[relation] = 0
        layer.relation_mix.copy_(weights)
        table[f"adds, layer {number}"] = adds
        table[f"W^R, layer {number}"] = weights.tolist()
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="What relations of an AttrFormer add.")
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    run = parser.parse_args(arguments).run
    trained = rp.load(run)
    model, loader = trained.model, trained.loaders["train"]
    model.inference = "batch"  # as in training, also where predictions read no relations
    batch = next(iter(loader)).to(model.device)
    rows = model.locate(batch if loader.packed else model.pack(batch))
    table = measure(model, rows)
    print(table.round(3).to_string())
    for number, layer in enumerate(model.trm_encoder.layer, 1):
        if layer.user_gate is not None:
            print(f"gate of layer {number}: {float(layer.user_gate):.4f}")


if __name__ == "__main__":
    main()
