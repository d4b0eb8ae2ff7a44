"""What a study says, in sentences: no more than its intervals allow."""

from __future__ import annotations

from recbole_pos.study.results import DONE, FAILED, Comparison, Results
from recbole_pos.study.shown import listed, number
from recbole_pos.study.tables import metric_name


def findings(results: Results, found: Comparison) -> list[str]:
    """What a table says, in sentences."""
    main, table = metric_name(found.table.metrics[0]), found.table
    mine = found.means[found.means["metric"] == table.metrics[0]].dropna(subset=["mean"])
    if mine.empty:
        return ["No run has finished yet."]
    best = mine.loc[mine["mean"].idxmax()]
    seeds = f"{int(best['seeds'])} seed{'s' if best['seeds'] > 1 else ''}"
    said = [f"Highest {main}: {best['row']}, {number(best['mean'])} (mean of {seeds})."]
    fits = len(table.rows) * len(results.plan.seeds)
    mine = results.runs[results.runs["row"].isin(table.rows)]
    waiting = fits - int(mine["status"].isin((DONE, FAILED)).sum())
    if waiting > 0:
        said.append(f"{waiting} of {fits} runs are not finished; these figures are preliminary.")
    pairs = found.differences
    if pairs.empty:
        return said
    starred = pairs[pairs["star"]]
    clear = [
        f"{line['row']} ({number(line['difference'], sign=True)})"
        for line in starred.to_dict("records")
    ]
    if clear:
        said.append(
            f"{len(clear)} of {len(pairs)} configurations differ significantly from "
            f"{table.reference} (Holm-corrected): {listed(clear)}."
        )
    else:
        said.append(
            f"None of {len(pairs)} configurations differs significantly from {table.reference} "
            "(Holm-corrected)."
        )
    seen = pairs["detectable"].dropna()
    if len(seen) and len(clear) < len(pairs):
        smallest, largest = number(seen.min()), number(seen.max())
        reach = smallest if smallest == largest else f"{smallest} to {largest}, by configuration"
        said.append(f"Minimum detectable difference (80% power): {reach}; smaller ones may exist.")
    lonely = pairs[~((pairs["seeds"] > 1) & (pairs["reference_seeds"] > 1))]
    if len(lonely):
        said.append(f"No statement on {listed(lonely['row'])}: it needs two seeds on both sides.")
    return said
