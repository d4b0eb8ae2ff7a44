"""``recbole-pos inspect relations``: what each attribute of a trained AttrFormer does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from pydantic_core import to_json
from rich.console import Console
from rich.table import Table
from torch import Tensor

from recbole_pos.errors import UsageError
from recbole_pos.inspect.pictures import (
    BLUE,
    GREEN,
    PINK,
    VERMILION,
    color_scale,
    new_figure,
    set_title,
    shorten,
    write,
)
from recbole_pos.inspect.trained import open_run, require_finite
from recbole_pos.layers.attention import MultiHeadAttention, TransformerLayer
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.relations import RelationLayer, SparseProduct
from recbole_pos.model.attrformer import AttrFormer
from recbole_pos.relations.declare import TIME, Relation
from recbole_pos.relations.lookup import PackedSequences

LAYERS = (BLUE, VERMILION, GREEN, PINK)

MEANING = {
    "known": "share of the events that can be related by the attribute",
    "read": "relations of an event that are kept, at most top_k",
    "others": "share of them that lead to other users",
    "adds": "size of what a layer adds by it, self-attention = 1; of users: how far aggregation "
    "moves the state, state = 1 (root mean square over events)",
    "gate": "weight of Norm(R^U) H, the states of like users and the own (AttrFormer, section "
    "3.1.3)",
}


@dataclass(frozen=True)
class RelationUse:
    """What one attribute does in the batches looked at; see ``MEANING``.

    Attributes:
        field: field of the relation; for users all their fields, which act as one.
        source: item, behaviour or user.
        known, read, others: as in ``MEANING``; others is NaN where nothing is read.
        adds: one number a layer; of users, NaN in layers that do not aggregate.
        heads: [layers, M'] W^R of equation 8; none for users.
        gate: one number a layer, of users alone; NaN where there is no gate.
    """

    field: str
    source: str
    known: float
    read: float
    others: float
    adds: list[float]
    heads: list[list[float]]
    gate: list[float]


@dataclass(frozen=True)
class RelationReport:
    """What was found, and the files that tell."""

    title: str
    uses: list[RelationUse]
    files: list[Path]


def inspect_relations(
    path: str | Path, batches: int = 8, data_path: str | Path | None = None
) -> RelationReport:
    """Measure how a trained AttrFormer uses its relations, in training batches without dropout.

    Writes relations.json and relations.png into the run folder.

    Args:
        path: a run folder, or a checkpoint in one.
        batches: batches of the first epoch to look at.
        data_path: the folder that holds the folder of the dataset; where the run found it if None.

    Raises:
        UsageError: if that is no trained AttrFormer, or one without relations.
        CheckpointError: if weights are no numbers, or lead to none.
    """
    if batches < 1:
        raise UsageError(f"--batches: {batches} is below 1")
    folder, made = open_run(path, data_path)
    model, config = made.model, made.config
    if not isinstance(model, AttrFormer):
        raise UsageError(f"{config['model']} has no relations; AttrFormer has")
    if not model.lookup.heads and model.lookup.user_table is None:
        raise UsageError("this model was trained without relations (relations: [])")
    model.inference = "batch"  # what was learned, also where predictions read nothing
    loader = made.loaders["train"]
    select_rows = model.window_rows if loader.packed else model.prefix_rows
    taken = islice(loader, min(batches, len(loader)))
    rows = [select_rows(batch.to(model.device))[0] for batch in taken]
    uses, events = measure_relations(model, rows)
    about = {"checkpoint": str(path), "model": config["model"], "dataset": config["dataset"]}
    about |= {"batches": len(rows), "events": events, "measures": MEANING}
    file = folder.path / "relations.json"
    content = to_json({**about, "relations": uses}, indent=2, inf_nan_mode="null")
    file.write_bytes(content + b"\n")
    title = f"{config['model']} on {config['dataset']}: {events:,} events of training batches"
    picture = draw_relations(uses, title, folder.path / "relations.png")
    return RelationReport(title, uses, [file, picture])


@torch.no_grad()
def measure_relations(
    model: AttrFormer, batches: Iterable[PackedSequences]
) -> tuple[list[RelationUse], int]:
    """One ``RelationUse`` for every relation of the heads, and one for users if there are any.

    Also how many events were looked at, context of overlapping windows included.

    Args:
        model: in evaluation mode.
        batches: the rows of each batch of its training loader.
    """
    declared = [r for r in model.declared if r.source != "user"]
    layers = list(cast("Iterable[RelationLayer]", model.trm_encoder.layer))
    sums = _Sums(len(declared), len(layers))
    for rows in batches:
        users = model.lookup.users[rows.events]
        seen: list[tuple[Tensor, SequenceContext, Tensor]] = []
        keep = seen.append
        hooks = [
            layer.register_forward_hook(lambda _, given, out, keep=keep: keep((*given, out)))
            for layer in layers
        ]
        try:
            model.row_states(rows, None)
        finally:
            for hook in hooks:
                hook.remove()
        relations = seen[0][1].relations
        sums.events += len(users)
        if relations.heads is not None:
            sums.read[:-1] += _per_relation(relations.heads, users)
            known = [relation.known(rows.events, model.lookup) for relation in model.lookup.heads]
            sums.known[:-1] += [events.sum() for events in known]
        if relations.users is not None:
            count = _per_relation(relations.users, users)
            sums.read[-1] += count[0] - [len(users), 0]  # an event's own state is no relation here
            assert model.lookup.user_table is not None
            sums.known[-1] += model.lookup.user_table.known[users].sum()
        for number, (layer, (x, ctx, out)) in enumerate(zip(layers, seen, strict=True)):
            sums.squares[number] += _squares(layer, x, ctx, out)
    require_finite([sums.squares], "what relations add")
    return sums.uses(model, declared, layers), sums.events


class _Sums:
    """Over batches: what each relation, users last, has and reads, and squares of what it adds."""

    def __init__(self, relations: int, layers: int) -> None:
        self.events = 0
        self.known = np.zeros(relations + 1)
        self.read = np.zeros((relations + 1, 2))  # all, of other users
        self.squares = np.zeros((layers, relations + 3))  # heads, users, self-attention, states

    def uses(
        self, model: AttrFormer, declared: Sequence[Relation], layers: Sequence[RelationLayer]
    ) -> list[RelationUse]:
        with np.errstate(invalid="ignore", divide="ignore"):
            others = self.read[:, 1] / self.read[:, 0]
            heads = np.sqrt(self.squares[:, :-3] / self.squares[:, -2:-1])
            users = np.sqrt(self.squares[:, -3] / self.squares[:, -1])
        known, read = self.known / self.events, self.read[:, 0] / self.events
        attention = [layer.multi_head_attention for layer in layers if declared]
        mix = [part.relation_mix.cpu().tolist() for part in attention]
        shares = list(zip(known, read, others, strict=True))
        uses = []
        for i, relation in enumerate(declared):
            field = TIME if relation.table == TIME else relation.field
            weights = [layer[i] for layer in mix]
            adds = heads[:, i].tolist()
            uses.append(RelationUse(field, relation.source, *shares[i], adds, weights, []))
        if model.lookup.user_table is not None:
            fields = ", ".join(r.field for r in model.declared if r.source == "user")
            gates = [layer.user_gate for layer in layers]
            gate = [float("nan") if g is None else float(g) for g in gates]
            adds = np.where([layer.aggregates for layer in layers], users, np.nan).tolist()
            uses.append(RelationUse(fields, "user", *shares[-1], adds, [], gate))
        return uses


def _per_relation(product: SparseProduct, users: np.ndarray) -> np.ndarray:
    """Return [M, 2] how many events are read, and how many of other users, by relation."""
    source = product.index.cpu().numpy()
    size = np.diff(product.offset.cpu().numpy(), append=len(source))
    row = np.repeat(np.arange(len(size)), size)
    relation, reader = np.divmod(row, len(users))
    count = len(size) // len(users)
    other = users[source] != users[reader]
    return np.stack(
        [np.bincount(relation[keep], minlength=count) for keep in (slice(None), other)], 1
    )


def _squares(layer: RelationLayer, x: Tensor, ctx: SequenceContext, out: Tensor) -> np.ndarray:
    """Sums of squares: by relation, by users, by self-attention, of the state before users."""
    attention = layer.multi_head_attention
    normed = attention.LayerNorm(x) if attention.pre_norm else x
    parts = []
    if ctx.relations.heads is not None:
        parts += list(attention.contributions(normed, ctx.relations))
    state = TransformerLayer.forward(layer, x, ctx)
    parts += [out - state, MultiHeadAttention.attention(attention, normed, ctx), state]
    return np.array([float(part.double().square().sum()) for part in parts])


def draw_relations(uses: Sequence[RelationUse], title: str, file: Path) -> Path:
    """Draw what relations add, layer by layer, and beside it W^R of every layer."""
    names = [shorten(use.field) + "\n(users; state = 1)" * (use.source == "user") for use in uses]
    heads = [use.heads for use in uses if use.heads]
    weights = [np.array(layer) for layer in zip(*heads, strict=True)]  # [relations, M'] by layer
    layers = len(uses[0].adds)
    widths = [3.4 + 0.09 * max(map(len, names))]
    widths += [max(1.2, 0.6 + 0.14 * weight.shape[1]) for weight in weights]
    figure = new_figure(sum(widths) + 1.2, 2.2 + 0.22 * (layers + 1) * len(uses))
    bars, *maps = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    place, bottom = np.arange(len(uses)), (len(uses) - 0.5, -0.5)
    for layer in range(layers):
        shift = 0.8 * ((layer + 0.5) / layers - 0.5)
        color, light = LAYERS[layer % len(LAYERS)], 0.6 ** (layer // len(LAYERS))
        style: dict[str, Any] = {"color": color, "alpha": light, "label": f"layer {layer + 1}"}
        bars.barh(place + shift, [use.adds[layer] for use in uses], 0.8 / layers, **style)
    bars.set(yticks=place, ylim=bottom, xlim=(0, None), xlabel="adds (self-attention = 1)")
    bars.set_yticklabels(names, parse_math=False)
    bars.grid(axis="x", alpha=0.3)
    if layers > 1:
        figure.legend(loc="outside lower center", ncols=min(layers, 8), frameon=False)
    for layer, (panel, weight) in enumerate(zip(maps, weights, strict=True), 1):
        image = panel.imshow(weight, interpolation="nearest", aspect="auto", **color_scale(weights))
        panel.set_facecolor("0.92")  # of users, who have none
        ticks = np.arange(weight.shape[1])
        panel.set(xticks=ticks, xticklabels=ticks + 1, xlabel="head", ylim=bottom, yticks=[])
        panel.set_title(f"$W^R$, layer {layer}", fontsize=10)
    if maps:
        figure.colorbar(image, ax=maps, label="weight")
    set_title(figure, title, "what each relation adds" + ", and its weights by head" * bool(maps))
    return write(figure, file)


def show(report: RelationReport, console: Console) -> None:
    """Print the table, what its columns mean, and the files."""

    def line(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False)

    line(report.title)
    table = Table("relation", "source")
    shares = {"known": ".0%", "read": ".1f", "others": ".0%"}
    layers = range(1, len(report.uses[0].adds) + 1)
    for column in (*shares, *(f"adds\nlayer {n}" for n in layers)):
        table.add_column(column, justify="right")
    for use in report.uses:
        cells = [_cell(getattr(use, name), form) for name, form in shares.items()]
        table.add_row(use.field, use.source, *cells, *(_cell(a, ".3f") for a in use.adds))
    console.print(table)
    for name in (*shares, "adds"):
        line(f"{name}: {MEANING[name]}")
    for use in report.uses:
        for number, gate in enumerate(use.gate, 1):
            if not np.isnan(gate):
                line(f"gate of layer {number}: {gate:.4f}, the {MEANING['gate']}")
    for file in report.files:
        line(str(file))


def _cell(value: float, form: str) -> str:
    return format(value, form) if np.isfinite(value) else "-"
