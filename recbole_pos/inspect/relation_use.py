"""``recbole-pos inspect relations``: what each attribute of a trained AttrFormer does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from pydantic_core import to_json
from torch import Tensor

from recbole_pos.errors import UsageError
from recbole_pos.inspect.attention import record_calls
from recbole_pos.inspect.pictures import (
    BLUE,
    GREEN,
    PINK,
    VERMILION,
    choose_colors,
    new_figure,
    shorten,
    write,
)
from recbole_pos.inspect.trained import Report, open_run, require_finite
from recbole_pos.layers.attention import MultiHeadAttention, TransformerLayer
from recbole_pos.layers.relations import RelationLayer
from recbole_pos.model.attrformer import AttrFormer
from recbole_pos.relations.declare import TIME
from recbole_pos.relations.lookup import PackedSequences
from recbole_pos.relations.search import Edges, EventOrder

LAYER_COLORS = (BLUE, VERMILION, GREEN, PINK)

MEANING = {
    "known": "share of the interactions that can be related by the attribute",
    "read": "relations of an interaction that are kept, at most top_k",
    "others": "share of them that lead to other users",
    "adds": "size of what a layer adds by it, self-attention = 1; of users: how far aggregation "
    "moves the state, state = 1 (root mean square over interactions)",
    "gate": "weight of Norm(R^U) H, the states of like users and the own (AttrFormer, section "
    "3.1.3)",
}


@dataclass(frozen=True)
class RelationUse:
    """Use of the relations by one attribute in the measured batches.

    Attributes:
        field: field of the relation; for users all their fields, which act as one.
        source: item, behaviour or user.
        known, read, others: see ``MEANING``; ``others`` is NaN if nothing is read.
        adds: for each layer, see ``MEANING``; for users, NaN in layers that do not aggregate.
        heads: [layers, M'] W^R of equation 8; empty for users.
        gate: for users, weight of aggregation in each layer or NaN without a gate; else empty.
    """

    field: str
    source: str
    known: float
    read: float
    others: float
    adds: list[float]
    heads: list[list[float]]
    gate: list[float]


def inspect_relations(
    path: str | Path, batches: int = 8, data_path: str | Path | None = None
) -> Report:
    """Measure how a trained AttrFormer uses its relations, in training batches without dropout.

    Writes relations.json and relations.png into the run folder.

    Args:
        path, data_path: see :func:`open_run`.
        batches: number of training batches to measure.

    Raises:
        UsageError: if the model is not an AttrFormer, or has no relations.
        CheckpointError: if weights, or what relations add, are not finite.
    """
    if batches < 1:
        raise UsageError(f"--batches: {batches} is below 1")
    folder, experiment = open_run(path, data_path)
    model, config = experiment.model, experiment.config
    if not isinstance(model, AttrFormer):
        raise UsageError(f"{config['model']} has no relations; AttrFormer has")
    if not model.lookup.heads and model.lookup.user_table is None:
        raise UsageError("this model was trained without relations (relations: [])")
    model.inference = "batch"  # as in training, also where predictions read no relations
    loader = experiment.loaders["train"]
    select_rows = model.pack_windows if loader.packed else model.pack_prefixes
    rows = [select_rows(batch.to(model.device))[0] for batch in islice(loader, batches)]
    uses, num_interactions = measure_relations(model, rows)
    content = {"checkpoint": str(path), "model": config["model"], "dataset": config["dataset"]}
    content |= {"batches": len(rows), "events": num_interactions, "measures": MEANING}
    content["relations"] = uses
    file = folder.path / "relations.json"
    file.write_bytes(to_json(content, indent=2, inf_nan_mode="null") + b"\n")
    run = f"{config['model']} on {config['dataset']}"
    title = f"{run}: {num_interactions:,} interactions of training batches"
    picture = draw_relations(uses, title, folder.path / "relations.png")
    table = pd.DataFrame(
        {
            "relation": use.field,
            "source": use.source,
            "known": f"{use.known:.0%}",
            "read": f"{use.read:.1f}",
            "others": f"{use.others:.0%}",
            **{f"adds, layer {n}": f"{added:.3f}" for n, added in enumerate(use.adds, 1)},
        }
        for use in uses
    ).replace(["nan", "nan%"], "-")
    notes = [f"{name}: {MEANING[name]}" for name in ("known", "read", "others", "adds")]
    notes += [
        f"gate of layer {number}: {gate:.4f}, the {MEANING['gate']}"
        for use in uses
        for number, gate in enumerate(use.gate, 1)
        if not np.isnan(gate)
    ]
    return Report(title, [table, *notes], [file, picture], content)


@torch.no_grad()
def measure_relations(
    model: AttrFormer, batches: Iterable[PackedSequences]
) -> tuple[list[RelationUse], int]:
    """Measure the use of every relation of the heads, and of users if there are such relations.

    Args:
        model: in evaluation mode.
        batches: the rows of each batch of its training loader.

    Returns:
        Uses of the relations in their order, users last; and the number of interactions measured,
        which counts those that overlapping windows repeat.
    """
    lookup = model.lookup
    declared = [relation for relation in model.declared if relation.source != "user"]
    layers = list(cast("Iterable[RelationLayer]", model.trm_encoder.layer))
    num_interactions = 0
    # an entry for each relation of the heads, and the last for users
    num_known = np.zeros(len(declared) + 1)
    num_reads = np.zeros((len(declared) + 1, 2))  # all, and to other users
    squares = np.zeros((len(layers), len(declared) + 3))  # see _sum_squares
    for rows in batches:
        order = lookup.make_order(rows, np.random.default_rng(model.seed))  # as in evaluation mode
        heads, users = lookup.find(rows, order)
        for i, (relation, edges) in enumerate(zip(lookup.heads, heads, strict=True)):
            num_known[i] += relation.is_known(rows.events, lookup).sum()
            num_reads[i] += _count_reads(edges, order)
        if users is not None and lookup.user_table is not None:
            num_known[-1] += lookup.user_table.is_known[order.user].sum()
            num_reads[-1] += _count_reads(users, order)
        num_interactions += len(order)
        squares += _sum_squares(model, layers, rows)
    require_finite([squares], "what relations add")
    of_relations, of_users, of_attention, of_states = np.split(squares, [-3, -2, -1], axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        share_of_others = num_reads[:, 1] / num_reads[:, 0]
        adds = np.sqrt(of_relations / of_attention)
        users_add = np.sqrt(of_users / of_states)[:, 0]
    share_known, mean_reads = num_known / num_interactions, num_reads[:, 0] / num_interactions
    measures = share_known.tolist(), mean_reads.tolist(), share_of_others.tolist()
    shares = list(zip(*measures, strict=True))
    mix = [layer.multi_head_attention.relation_mix.cpu().tolist() for layer in layers if declared]
    uses = [
        RelationUse(
            TIME if relation.table == TIME else relation.field,
            relation.source,
            *shares[i],
            adds=adds[:, i].tolist(),
            heads=[weights[i] for weights in mix],
            gate=[],
        )
        for i, relation in enumerate(declared)
    ]
    if lookup.user_table is not None:
        fields = ", ".join(x.field for x in model.declared if x.source == "user")
        gates = [layer.user_gate for layer in layers]
        gate = [float("nan") if weight is None else float(weight) for weight in gates]
        added = np.where([layer.aggregates for layer in layers], users_add, np.nan).tolist()
        uses.append(RelationUse(fields, "user", *shares[-1], added, [], gate))
    return uses, num_interactions


def _count_reads(edges: Edges, order: EventOrder) -> list[int]:
    """Return how many relations interactions read, and how many of them lead to other users."""
    is_other = order.user[edges.reader] != order.user[edges.source]
    return [len(is_other), int(is_other.sum())]


def _sum_squares(
    model: AttrFormer, layers: list[RelationLayer], rows: PackedSequences
) -> np.ndarray:
    """Return sums of squares [layers, relations + 3] over the interactions of rows.

    Columns: what each relation adds, what aggregation by users adds, self-attention, states.
    """
    with record_calls(layers) as calls:
        model.encode_packed(rows, None)
    sums = []
    for layer, (x, ctx, output) in zip(layers, calls, strict=True):
        attention = layer.multi_head_attention
        normed = attention.LayerNorm(x) if attention.pre_norm else x
        vectors: list[Tensor] = []
        if ctx.relations.heads is not None:
            vectors += attention.compute_contributions(normed, ctx.relations)
        state = TransformerLayer.forward(layer, x, ctx)
        vectors += [output - state, MultiHeadAttention.attention(attention, normed, ctx), state]
        sums.append([float(vector.double().square().sum()) for vector in vectors])
    return np.array(sums)


def draw_relations(uses: Sequence[RelationUse], title: str, file: Path) -> Path:
    """Draw what relations add in each layer, and beside it W^R of every layer; return ``file``."""
    note = "\n(users; state = 1)"
    names = [shorten(use.field) + (note if use.source == "user" else "") for use in uses]
    heads = [use.heads for use in uses if use.heads]
    # W^R [relations, M'] of each layer
    weights = [np.array(of_layer) for of_layer in zip(*heads, strict=True)]
    num_layers = len(uses[0].adds)
    widths = [3.4 + 0.09 * max(map(len, names))]
    widths += [max(1.2, 0.6 + 0.14 * weight.shape[1]) for weight in weights]
    figure = new_figure(sum(widths) + 1.2, 2.2 + 0.22 * (num_layers + 1) * len(uses))
    bars, *maps = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    y, y_limits = np.arange(len(uses)), (len(uses) - 0.5, -0.5)
    for layer in range(num_layers):
        shift = 0.8 * ((layer + 0.5) / num_layers - 0.5)
        color = LAYER_COLORS[layer % len(LAYER_COLORS)]
        alpha = 0.6 ** (layer // len(LAYER_COLORS))  # lighter where a colour repeats
        style: dict[str, Any] = {"color": color, "alpha": alpha, "label": f"layer {layer + 1}"}
        bars.barh(y + shift, [use.adds[layer] for use in uses], 0.8 / num_layers, **style)
    bars.set(yticks=y, ylim=y_limits, xlim=(0, None), xlabel="adds (self-attention = 1)")
    bars.set_yticklabels(names, parse_math=False)
    bars.grid(axis="x", alpha=0.3)
    if num_layers > 1:
        figure.legend(loc="outside lower center", ncols=min(num_layers, 8), frameon=False)
    for layer, (panel, weight) in enumerate(zip(maps, weights, strict=True), 1):
        image = panel.imshow(
            weight, interpolation="nearest", aspect="auto", **choose_colors(weights)
        )
        panel.set_facecolor("0.92")  # shows in the rows of users, which have no W^R
        ticks = np.arange(weight.shape[1])
        panel.set(xticks=ticks, xticklabels=ticks + 1, xlabel="head", ylim=y_limits, yticks=[])
        panel.set_title(f"$W^R$, layer {layer}", fontsize=10)
    if maps:
        figure.colorbar(image, ax=maps, label="weight")
    subtitle = "what each relation adds" + (", and its weights by head" if maps else "")
    return write(figure, file, title, subtitle)
