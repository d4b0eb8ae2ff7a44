"""How far back trained models look, and how widely ("Rotate Both Ways", section 5.3).

    python studies/to_rope/attention.py STUDY_DIR [--users 500] [--min_events 50]
    python studies/to_rope/attention.py RUN_DIR [--users 200] [--min_events 20]

Of a study it prints attention distance in interactions and entropy in nats by layer (Figures 3 and
4): means over heads, histories and all their queries, ± the standard deviation over seeds. It needs
the weights, so a study that was trained here. Of a run it draws these, and the distance in hours,
by layer and head (RUN_DIR/attention_distance.png), and prints the periods of its rotations by time.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

import recbole_pos as rp
from recbole_pos.experiment.pictures import find_attention_layers, iterate_attention, write
from recbole_pos.layers.sequence_batch import SequenceBatch

COLORS = {"all queries": "#0072B2", "last query": "#D55E00"}
MEASURES = ("distance (interactions)", "entropy (nats)", "distance (hours)")


def measure(weights: Tensor, batch: SequenceBatch) -> Tensor:
    """Return distance, entropy and hours of attention weights, for each history.

    With a_ij the absolute weights, each row divided by its sum: distance sum_j a_ij (i - j) in
    interactions, entropy -sum_j a_ij ln a_ij in nats, hours sum_j a_ij (t_i - t_j) / 3600.

    Args:
        weights: [b, h, t, t] aligned at the start, zero for later keys; of any sign and sum.
        batch: the histories, with times.

    Returns:
        [b, 2, 3, h] float64: first the mean over all queries of a history, then the value of its
        last query, which predicts the next item.
    """
    a = weights.double().abs()
    a = a / a.sum(-1, keepdim=True).clamp_min(torch.finfo(a.dtype).tiny)
    index = torch.arange(batch.width, dtype=a.dtype, device=a.device)
    hours = batch.pad(batch.elapsed.to(a.dtype) / 3600, "start")[:, None]  # [b, 1, t]
    past_hours = (a @ hours[..., None]).squeeze(-1)
    total = a.sum(-1)  # 1, but 0 for a row of zeros
    measures = [
        total * index - a @ index,
        torch.special.entr(a).sum(-1),
        total * hours - past_hours,
    ]
    by_query = torch.stack(measures, 1)  # [b, 3, h, t]
    last = (batch.lengths - 1)[:, None, None, None].expand(*by_query.shape[:3], 1)
    padding = index >= batch.lengths[:, None, None, None]
    mean = by_query.masked_fill(padding, 0).sum(-1) / batch.lengths[:, None, None]
    return torch.stack((mean, by_query.gather(-1, last).squeeze(-1)), 1)


def sample_rows(trained: rp.Recommender, users: int, min_events: int) -> np.ndarray:
    """Sample the newest test row of at most ``users`` users with enough interactions."""
    model, table = trained.model, trained.loaders["test"]._dataset.inter_feat
    fields = (model.USER_ID, model.ITEM_SEQ_LEN)
    rows = pd.DataFrame({name: table[name].numpy() for name in fields}).sort_values(list(fields))
    rows = rows.groupby(model.USER_ID).tail(1).query(f"{model.ITEM_SEQ_LEN} >= {min_events}")
    rng = np.random.default_rng(0)
    return np.sort(rng.choice(rows.index, min(users, len(rows)), replace=False))


def measure_run(trained: rp.Recommender, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the measures [layers, 2, 3, h] of a run, and [2, 3] of attention equal over the past.

    They are averaged over ``rows`` [users] of the test loader.
    """
    total, uniform = torch.zeros(()), torch.zeros(())
    for weights, batch in iterate_attention(trained.model, trained.loaders["test"], rows):
        total = total + torch.stack([measure(layer, batch).sum(0) for layer in weights]).cpu()
        b, t = batch.batch_size, batch.width
        equal = torch.ones(b, 1, t, t, device=batch.lengths.device)
        uniform = uniform + measure(equal.tril(), batch).sum(0).cpu()
    return (total / len(rows)).numpy(), (uniform / len(rows))[..., 0].numpy()


def study_table(study: Path, users: int, min_events: int) -> pd.DataFrame:
    """Return distance and entropy by layer, a line for each configuration of a study with runs."""
    lines = []
    for run in pd.read_csv(study / "runs.csv").query("status == 'done'").itertuples():
        trained = rp.load(study / run.path)
        layers, _ = measure_run(trained, sample_rows(trained, users, min_events))
        means = layers[:, 0].mean(-1)  # [layers, measures] of all queries
        for index, name in enumerate(MEASURES[:2]):
            for number, value in enumerate(means[:, index], 1):
                lines.append((run.row, f"{name}, layer {number}", value))
    frame = pd.DataFrame(lines, columns=["row", "measure", "value"])
    return frame.pivot_table("value", "row", "measure", format_seeds, sort=False)


def format_seeds(values: pd.Series) -> str:
    """Return the mean of seeds with their standard deviation, which is 0 for one seed."""
    return f"{values.mean():.2f} ± {values.std() if len(values) > 1 else 0:.2f}"


def draw(layers: np.ndarray, uniform: np.ndarray, title: str, file: Path) -> None:
    """Draw the measures [layers, 2, 3, h] of a run, and [2, 3] of equal attention."""
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    numbers = np.arange(1, len(layers) + 1)
    for index, panel in enumerate(figure.subplots(1, len(MEASURES))):
        for which, (queries, color) in enumerate(COLORS.items()):
            by_head, equal = layers[:, which, index], uniform[which, index]  # [layers, h], ()
            panel.plot(numbers, by_head, "-o", color=color, alpha=0.5, ms=4, lw=0.8)
            panel.plot(numbers, by_head.mean(-1), "-o", color=color, ms=8, label=queries)
            panel.axhline(equal, color=color, ls=":", label=f"{queries}, equal weights")
        panel.set(xlabel="layer", xticks=numbers, ylabel=MEASURES[index])
        panel.set_ylim(0)
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    print(write(figure, file, title, "small marks: heads; large ones: their mean"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Attention distance and entropy.")
    parser.add_argument("folder", type=Path, metavar="STUDY_DIR | RUN_DIR")
    parser.add_argument("--users", type=int, default=500, help="how many to sample at most")
    parser.add_argument("--min_events", type=int, default=50, help="shortest history to include")
    args = parser.parse_args(arguments)
    if (args.folder / "runs.csv").is_file():
        print(study_table(args.folder, args.users, args.min_events).to_string())
        return
    trained = rp.load(args.folder)
    rows = sample_rows(trained, args.users, args.min_events)
    title = f"{trained.config['model']} on {trained.config['dataset']}: {len(rows)} test users"
    draw(*measure_run(trained, rows), title, args.folder / "attention_distance.png")
    for number, layer in enumerate(find_attention_layers(trained.model), 1):
        for scheme in layer.position.parts().values():
            periods = scheme.time_periods()  # by head; None without rotations by time
            for head, seconds in enumerate([] if periods is None else periods, 1):
                hours = (seconds[seconds.isfinite()] / 3600).sort().values.tolist()
                texts = " ".join(f"{period:.3g}" for period in hours)
                print(f"layer {number}, head {head}: periods in hours {texts}")


if __name__ == "__main__":
    main()
