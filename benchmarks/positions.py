"""``make bench-positions``: the cost of position schemes, as epochs against PosSASRec's.

Sides take turns, every turn in a process of its own; each figure is the best epoch of its side.
Writes the groups named (``order``, ``time``, ``block``; by default all) into
``results/speed_positions.md``.
"""

from __future__ import annotations

import math
import sys
import tempfile
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from data import make_log, write_atomic
from page import RESULTS, in_turns, machine, mark, replace_section, run_alone, table, time_call
from torch import Tensor
from training import build

from recbole_pos.experiment.build import Experiment
from recbole_pos.experiment.memory import keep_freed_memory
from recbole_pos.layers.context import SequenceContext, future_mask
from recbole_pos.layers.dropout import Dropout
from recbole_pos.layers.gated_blocks import PointwiseAttention
from recbole_pos.position import kernel as products
from recbole_pos.position.compose import Compose
from recbole_pos.position.kernel import PositionalKernel
from recbole_pos.position.time_buckets import find_bucket
from recbole_pos.yaml_files import ROOT, read_yaml

ROUNDS, EPOCHS = 3, 5
NAIVE = "kernel, naive"
SCHEMES = "learned nope sinusoidal rope alibi t5 kerple cape kernel".split()
ORDER: dict[str, dict[str, Any]] = {name: {"position": [name]} for name in SCHEMES}
ORDER[NAIVE] = {"position": ["kernel"]}
# two heads, since a split needs them
TIME: dict[str, dict[str, Any]] = {
    "learned, 2 heads": {"position": ["learned"]},
    "time_rope": {"position": ["time_rope"]},
    **{
        f"to_rope, {fusion}": {"position": ["to_rope"], "fusion": fusion}
        for fusion in ("early", "split_dim", "split_head")
    },
    "to_rope, early, all learned": {
        "position": ["to_rope"],
        "fusion": "early",
        "gate": "sigmoid",
        "learn_frequencies": "ladder",
        "learn_scales": True,
    },
    "hstu": {"position": ["hstu"]},
    "learned + time_learned": {"position": ["learned", "time_learned"]},
}
TIME = {name: {**options, "n_heads": 2} for name, options in TIME.items()}
PLAIN_BLOCK = "block: hstu, plain torch"
HSTU = {"position": ["hstu"], "block": "hstu", "n_heads": 2}
BLOCK: dict[str, dict[str, Any]] = {"block: hstu": HSTU, PLAIN_BLOCK: HSTU}
# which rows, of which lengths; ratios are to the first row
GROUPS = {"order": (ORDER, (200, 1000)), "time": (TIME, (200,)), "block": (BLOCK, (200, 1000))}
GOALS = {
    ("kernel", 200): 1.25,
    ("kernel", 1000): 1.35,
    **{("rope", length): 1.15 for length in (200, 1000)},
    **{(name, 200): 1.2 for name in TIME if name.startswith("to_rope")},
}
SAME = {
    "hidden_size": 64,
    "inner_size": 256,
    "n_layers": 2,
    "n_heads": 1,
    "hidden_dropout_prob": 0.2,
    "attn_dropout_prob": 0.0,
}


class NaiveKernel(PositionalKernel):
    """Equation 9 as it is written: logits times U, a softmax over a masked [b, h, t, t], L V."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, ctx: SequenceContext, dropout: Dropout
    ) -> Tensor:
        q, k, v = (ctx.pad(x, "end").transpose(1, 2) for x in (query, key, value))
        t = ctx.width
        logits = (q @ k.transpose(-1, -2)) @ self.U.matrix(t).t() / math.sqrt(q.size(-1))
        real = ctx.pad(query.new_ones(len(query)), "end").bool()
        hidden = future_mask(t, q.device) | ~real[:, None, None, :]
        weights = logits.masked_fill(hidden, -1e9).softmax(-1)
        return ctx.unpad((weights @ (self.L.matrix(t) @ v)).transpose(1, 2), "end")


class PlainBlock(PointwiseAttention):
    """HSTU's layer as its public code writes it, with bias and weights [b, h, t, t] in memory."""

    def forward(self, x: Tensor, ctx: SequenceContext) -> Tensor:
        query, key, value, gate = self._project_gated(x)
        q, k, v = (ctx.pad(part, "start").transpose(1, 2) for part in (query, key, value))
        times, column = ctx.pad(ctx.elapsed, "start"), torch.arange(ctx.width)
        scheme = self.position.schemes["hstu"]
        buckets = find_bucket(times[:, :, None] - times[:, None], len(scheme.time))
        distance = (column[:, None] - column).clamp(min=0)
        bias = scheme.time[buckets.long()] + scheme.distance[distance]
        weights = F.silu(q @ k.transpose(-1, -2) + bias[:, None]) / ctx.max_length
        out = (weights.tril() @ v).transpose(1, 2)
        out = self.gate_norm(ctx.unpad(out, "start").reshape(x.shape)) * gate.reshape(x.shape)
        return x + self.dense(self.out_dropout(out))


def build_scheme(scheme: str, dataset: str, options: dict[str, Any]) -> Experiment:
    """Return PosSASRec with a scheme."""
    given = {**SAME, **options, **{**ORDER, **TIME, **BLOCK}[scheme]}
    made = build("PosSASRec", dataset, **given)
    if scheme == NAIVE:
        given = read_yaml(ROOT / "position" / "kernel.yaml")
        for layer in made.model.trm_encoder.layer:
            attention = layer.multi_head_attention
            old = attention.position.schemes["kernel"]
            new = NaiveKernel(made.model.dimensions, **given)
            new.U, new.L = old.U, old.L  # the optimiser knows these
            attention.position = Compose({"kernel": new})
    if scheme == PLAIN_BLOCK:
        for layer in made.model.trm_encoder.layer:
            layer.multi_head_attention.__class__ = PlainBlock
    return made


def time_epochs(scheme: str, length: int) -> list[float]:
    """Return the seconds of epochs of one scheme in this process."""
    keep_freed_memory()
    options: dict[str, Any] = {"MAX_ITEM_LIST_LENGTH": length, "train_batch_size": 32}
    if length == 200:
        made = build_scheme(scheme, "ml-100k", options)
    else:
        with tempfile.TemporaryDirectory() as folder:
            users, events = 24, 2002  # histories of two windows
            chosen = np.random.default_rng(0).integers(1, 2001, users * events)
            write_atomic(make_log(np.full(users, events), chosen), folder, "long")
            options |= {"train_batch_size": 16, "data_path": folder}
            made = build_scheme(scheme, "long", options)
    loader = made.trainer.training_loader(made.loaders["train"])
    return [made.trainer._train_epoch(loader, epoch)["seconds"] for epoch in range(EPOCHS)]


def multiply(weight: Tensor, x: Tensor) -> None:
    """Compute a Toeplitz product and its gradient."""
    products.toeplitz_product(weight, x).sum().backward()


def toeplitz() -> str:
    """Return the time of a Toeplitz product and its gradient, by a matrix and by halves and FFT."""
    rows, chosen = [], products.FFT_LENGTH
    for t in (200, 500, 1000, 2000, 4000):
        weight = torch.randn(t, requires_grad=True)
        x = torch.randn(t, max(64, 2**19 // t), requires_grad=True)
        cells = []
        for products.FFT_LENGTH in (t, min(t // 2, chosen)):
            best = min(time_call(partial(multiply, weight, x)) for _ in range(8))
            cells.append(f"{1e3 * best:.1f} ms")
        rows.append([f"{t:,}", *cells])
    products.FFT_LENGTH = chosen
    return table(("interactions", "in blocks", "by halves and FFT"), rows)


def measure(group: str) -> str:
    """Return the table of the best epoch of each row of a group."""
    schemes, lengths = GROUPS[group]
    sides = [(scheme, length) for length in lengths for scheme in schemes]
    runs = in_turns(sides, ROUNDS, lambda side: run_alone(time_epochs, *side))
    best = {side: min(map(min, of_side)) for side, of_side in runs.items()}
    data = {200: "ml-100k, L=200", 1000: "generated, L=1000"}
    heads = ["scheme", *(h for length in lengths for h in (data[length], "ratio", "goal"))]
    rows, first = [], next(iter(schemes))
    for name in schemes:
        cells = []
        for length in lengths:
            ratio, goal = best[name, length] / best[first, length], GOALS.get((name, length))
            met = "" if goal is None else f"<= {goal}: {mark(ratio <= goal)}"
            cells += [f"{best[name, length]:.2f} s", f"{ratio:.2f}", met]
        rows.append([name, *cells])
    parts = [f"{machine()}.", table(heads, rows)]
    if group == "order":
        for length in lengths:
            ratio = best[NAIVE, length] / best["kernel", length]
            parts.append(f"L={length}: naive kernel / kernel {ratio:.2f}")
        parts.append(toeplitz())
    return "\n\n".join(parts)


if __name__ == "__main__":
    keep_freed_memory()
    for group in sys.argv[1:] or GROUPS:
        replace_section(RESULTS / "speed_positions.md", group, measure(group))
