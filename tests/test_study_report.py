"""Tables and the report of a generated study: their content, on terminals of any width."""

import dataclasses
import io
import itertools
import re
from html import unescape

import numpy as np
import pandas as pd
import pytest
import yaml
from rich.console import Console
from study_simulation import Case

from recbole_pos.config.metrics import compute_gains
from recbole_pos.errors import UsageError
from recbole_pos.study.plan import Source, TablePlan
from recbole_pos.study.power import make_power_table
from recbole_pos.study.rendered_table import Cell, RenderedTable, format_number
from recbole_pos.study.result_tables import (
    make_bins_table,
    make_comparison_tables,
    make_failures_table,
    make_metrics_table,
    make_search_table,
    render_markdown,
    tabulate,
)
from recbole_pos.study.results import RUN_FOLDERS, Comparison, Results, compare_rows
from recbole_pos.study.statistics import RankTable, estimate_difference
from recbole_pos.study.study_file import make_plan
from recbole_pos.study.study_folder import StudyFacts
from recbole_pos.study.study_report import draw_charts, render_report, write_findings

STUDY = """
title: Position schemes on a generated shop
question: >-
  Does a model that knows distances in time recommend better than one that knows only the order?
dataset: shop
base: {n_layers: 2}
rows:
  Pop: {model: Pop, search: false}
  NoPE: {model: PosSASRec, position: [nope]}
  Learned: {model: PosSASRec, position: [learned]}
  RoPE: {model: PosSASRec, position: [rope]}
  Kernel: {model: KernelAttention}
  TO-RoPE, time and order together: {model: TORoPE}
  RoPE + kernel: {attach: {to: RoPE, schemes: [kernel]}}
  FPARec: {model: FPARec}
search: {hidden_dropout_prob: [0.2, 0.3]}
seeds: 3
reference: NoPE
metrics: [ndcg@10, hit@10, itemcoverage@10]
bins: {history: [5, 15], popularity: [10, 100], cold: true}
paper: {NoPE: {ndcg@10: 0.0316}, Kernel: {ndcg@10: 0.0394, hit@10: 0.0683}}
"""
FAILED, ATTACHED = "FPARec", "RoPE + kernel"
LONELY = "TO-RoPE, time and order together"  # it has one seed


@pytest.fixture(scope="module")
def results() -> Results:
    """Rows of three seeds and of one, an attached one, a failure."""
    users, rng = 600, np.random.default_rng(0)
    plan = make_plan(Source("shop.yaml", yaml.safe_load(STUDY)))
    targets = pd.DataFrame({"user": np.arange(users), "item": rng.integers(900, size=users)})
    popularity = rng.negative_binomial(1, 0.01, users)
    targets = targets.assign(history=1 + rng.geometric(0.1, users), popularity=popularity)

    # Ranks: Kernel is truly better than the others, Pop worse; RoPE + kernel is nearly RoPE.
    rows = ["NoPE", "Kernel", "Learned", "RoPE", LONELY, "Pop"]
    ranks, _ = Case((3,) * len(rows), shift=-0.9, units=users).ranks(rng)
    by_row = dict(zip(rows, ranks, strict=True))
    by_row["Pop"] = by_row["Pop"] * 5 + 4
    by_row[ATTACHED] = by_row["RoPE"] + (rng.random((3, users)) < 0.1)

    frames, lines, curves = {}, [], []
    reason = "the loss is not a number after 3 epochs; a smaller learning_rate often helps"
    for row, seed in itertools.product(plan.rows, plan.seeds):
        line = {"row": row, "seed": seed, "status": "done", "device": "cpu", "commit": "0a1b2c3"}
        if row == FAILED:
            lines.append({**line, "status": "failed", "reason": reason})
            continue
        if row == LONELY and seed != 2020:
            lines.append({**line, "status": "waiting"})
            continue
        rank = by_row[row][seed - 2020]
        frames[row, seed] = targets.assign(rank=rank)
        line |= {name: compute_gains(rank, name).mean() for name in ("ndcg@10", "hit@10")}
        line |= {"itemcoverage@10": rng.normal(0.6, 0.03), "epochs": 20 if row != "Pop" else 1}
        line |= {"seconds": rng.uniform(300, 900), "parameters": 800_000 + 1000 * len(row)}
        if row == "Pop":  # there is nothing to train
            lines.append({**line, "seconds": 0.4, "parameters": 0, "validation": None})
            continue
        lines.append({**line, "validation": line["ndcg@10"] * 1.3})
        for epoch in range(1, 21):
            point = {"row": row, "seed": seed, "epoch": epoch}
            curves.append({**point, "value": line["ndcg@10"] * 1.3 * (1 - np.exp(-epoch / 5))})

    tried = pd.DataFrame({"trial": [0, 1], "value": [0.07, 0.071], "metric": "ndcg@10"})
    tried["options"] = ["hidden_dropout_prob: 0.2", "hidden_dropout_prob: 0.3"]
    searches = [tried.assign(row=row, chosen=tried["trial"] == 1) for row in plan.num_trials]
    return Results(
        plan=plan,
        runs=pd.DataFrame(lines),
        ranks=RankTable.from_runs(frames),
        curves=pd.DataFrame(curves),
        searches=pd.concat(searches),
        command="recbole-pos compare shop.yaml --data_path FOLDER",
        facts=StudyFacts(
            data={"users": users, "items": 900, "events": 18_200, "split": "leave one out by time"},
            versions={"recbole-pos": "0.3.0", "recbole": "1.2.0", "torch": "2.13.0"},
        ),
    )


@pytest.fixture(scope="module")
def found(results) -> Comparison:
    return compare_rows(results, results.plan.tables[0])


def table_plan(*rows: str, metric: str = "ndcg@10") -> TablePlan:
    """A table whose reference is the first row."""
    return TablePlan(title=" and ".join(rows), rows=rows, metrics=(metric,), reference=rows[0])


def line_of(table: RenderedTable, row: str) -> dict[str, Cell]:
    line = next(line for line in table.lines if line[0].text == row)
    return dict(zip(table.columns, line, strict=True))


def test_differences_need_ranks_and_are_by_seed_where_models_are_shared(results):
    found = compare_rows(dataclasses.replace(results, ranks=None), results.plan.tables[0])
    assert len(found.means) == 21 and found.differences.empty and not found.bins
    assert len(make_comparison_tables(results, found)) == 1
    # a metric that is no mean over targets cannot be compared by target
    table = table_plan("NoPE", "RoPE", metric="itemcoverage@10")
    assert compare_rows(results, table).differences.empty
    shared = compare_rows(results, table_plan("RoPE", ATTACHED)).differences.iloc[0]
    totals, _ = results.ranks.sum_gains("ndcg@10")
    sides = totals[ATTACHED], totals["RoPE"]
    assert shared["error"] == estimate_difference(*sides, is_coupled=True).error
    assert shared["error"] != estimate_difference(*sides).error


def test_the_main_table(results, found):
    table = make_metrics_table(results, found)
    kernel, lonely, failed = (line_of(table, r) for r in ("Kernel", LONELY, "FPARec"))
    assert kernel["seeds"] == Cell("3") and lonely["seeds"] == Cell("1 of 3")
    assert failed["seeds"] == Cell("0 of 3", "3 failed") and failed["NDCG@10"] == Cell()
    assert kernel["NDCG@10"].bold and kernel["NDCG@10"].detail == "paper 0.0394"
    assert re.fullmatch(r"0\.\d{4} ± 0\.\d{4}", kernel["NDCG@10"].text)
    assert sum(line_of(table, row)["HR@10"].bold for row in results.plan.rows) == 1
    assert line_of(table, "Pop")["NDCG@10 - NoPE"].text.endswith("*")
    assert lonely["NDCG@10 - NoPE"].detail.endswith("]†")
    assert "600 targets; users are taken as independent." in table.notes
    assert any(note.startswith("† one seed") for note in table.notes)


def test_a_table_says_which_targets_depend_on_the_order_of_ties(results, found):
    split = {"split": {"LS": "valid_and_test"}, "target": "all", "targets": {"test": 600}}
    facts = StudyFacts(split={**split, "tied_targets": {"test": 1200}})
    table = make_metrics_table(dataclasses.replace(results, facts=facts), found)
    assert "Protocol: split LS: valid_and_test, 600 test targets (target: all)." in table.notes
    assert any(note.startswith("1,200 test targets have another item") for note in table.notes)


def test_columns_that_not_every_table_has(results, found):
    """Validation where it is asked for, cold targets where content is read."""
    content = yaml.safe_load(STUDY)
    content["rows"]["NoPE"]["item_vectors"] = "v.npy"
    content["tables"] = [{"validation": True}]
    plan = make_plan(Source("shop.yaml", content))
    ranks, targets = results.ranks, results.ranks.targets
    other = dataclasses.replace(results, plan=plan)
    both = compare_rows(other, plan.tables[0])
    table, column = make_metrics_table(other, both), "NDCG@10, validation"
    names = " ".join(make_metrics_table(results, found).columns)
    assert "validation" not in names and "cold" not in names
    reported = results.done.groupby("row")["validation"].mean()
    assert line_of(table, "RoPE")[column].text.startswith(format_number(reported["RoPE"]))
    assert line_of(table, "Pop")[column] == Cell()  # it has none
    assert line_of(table, reported.idxmax())[column].bold
    cold = targets["popularity"].to_numpy() == 0
    of_row = (ranks.runs["row"] == "RoPE").to_numpy()
    want = format_number((ranks.rank[of_row][:, cold] < 10).mean())
    assert line_of(table, "RoPE")["Recall@10, cold targets"].text.startswith(want)
    assert any(f"Cold targets: {cold.sum():,}," in note for note in table.notes)


def test_bins_and_failures_and_searches(results, found):
    table = make_bins_table(found, "history")
    assert re.fullmatch(r"history 6 to 15 \(\d+ targets\)", table.columns[2])
    assert re.match(r"[+-]0\.\d{4}\*? \[", line_of(table, "Pop")[table.columns[1]].detail)
    failed, searched = make_failures_table(results), make_search_table(results)
    assert len(failed.lines) == 3 and "not a number" in failed.lines[0][2].text
    assert line_of(searched, "RoPE")["chosen"] == Cell("hidden_dropout_prob: 0.3")
    assert "validation only" in searched.notes[0]


def test_names_of_the_users_are_no_markup():
    """Of markdown, of LaTeX or of rich, which prints tables on a terminal."""
    lines = ((Cell("[blue]a|b"), Cell("1", "detail", bold=True)),)
    table = RenderedTable("[red]t", ("row", "[bold]x"), lines, ("[i]note",))
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    assert all(
        part in console.file.getvalue() for part in ("[red]t", "[bold]x", "[blue]a|b", "[i]note")
    )
    assert "| [blue]a\\|b | **1** (detail) |" in table.markdown()
    table = RenderedTable("50% of A & B_c", ("row", "_x"), lines, ("p < 0.05",))
    text = table.latex()
    assert r"\caption{50\% of A \& B\_c. p $<$ 0.05}" in text and r"\begin{tabular}{lr}" in text
    assert "\\toprule\nrow & \\_x \\\\\n\\midrule\n" in text
    assert r"{[blue]a|b} & \textbf{1} {\scriptsize detail} \\" in text


def test_a_plan_has_a_column_for_each_independent_row(results):
    table = make_power_table(results, wanted=0.01)
    assert table.columns == ("seeds of each", "like NoPE", "Pop", "Learned", "RoPE", "Kernel")
    one, last = table.lines[0], table.lines[-1]
    assert one[0].text == "1†" and re.fullmatch(r"0\.\d{4}", one[1].text)
    assert last[0].text == "needed for 0.01" and last[1].text.isdigit() and len(table.lines) == 11
    plan = results.plan.model_copy(update={"tables": [table_plan("RoPE", ATTACHED)]})
    coupled = make_power_table(dataclasses.replace(results, plan=plan))
    assert "NoPE" in coupled.columns and ATTACHED not in coupled.columns
    plan = results.plan.model_copy(update={"tables": [table_plan(LONELY, "Pop")]})
    with pytest.raises(UsageError, match=f"--rows '{LONELY}' --seeds 2"):
        make_power_table(dataclasses.replace(results, plan=plan))


def test_a_csv_has_everything_that_is_known(found):
    frame = tabulate([found])
    line = frame[(frame["row"] == "Kernel") & (frame["bin"] == "all targets")].iloc[0]
    expected = found.differences.set_index("row").loc["Kernel"].drop("reference")
    assert line[expected.index].to_dict() == expected.to_dict()
    assert set(frame["bin"]) > {"all targets", "history over 15", "cold items"}


def test_findings_say_no_more_than_the_intervals(results, found):
    message = " ".join(write_findings(results, found))
    assert "Highest NDCG@10: Kernel" in message
    assert "Significantly different from NoPE (Holm-corrected): Pop (" in message
    assert f"No statement on {LONELY}" in message
    assert "2 of 24 runs are not finished" in message
    assert re.search(r"detectable difference .*: 0\.\d{4} to 0\.\d{4}", message)
    none = dataclasses.replace(found, differences=found.differences.assign(star=False))
    message = " ".join(write_findings(results, none))
    assert "No significant difference from NoPE (Holm-corrected)." in message
    folders = results.plan.model_copy(update={"source": Source(RUN_FOLDERS, {})})
    given = dataclasses.replace(results, plan=folders)  # whose rows have seeds of their own
    assert "not finished" not in " ".join(write_findings(given, found))


def words_of(page: str) -> str:
    bare = re.sub(r"<style.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL)
    return " ".join(unescape(bare).split())


def test_the_report_says_everything_and_needs_nothing_else(results, found):
    text = render_report(results)
    assert not re.search(r"<(script|link|iframe)|@import|url\(", text)
    referred = re.findall(r'\b(?:src|href)="([^"]*)"', text)
    assert len(referred) == 4 and all(place.startswith("data:image/svg") for place in referred)
    words = words_of(text)
    for part in (
        *(results.plan.title, results.plan.question, "recbole-pos compare shop.yaml", "2.13.0"),
        *("the loss is not a number after 3 epochs", "NDCG@10 by history", "question: "),
        *("NDCG@10 against training time", "Validation ", *write_findings(results, found)),
        "Data: shop, 600 users, 900 items, 18,200 interactions, split: leave one out by",
        "with 2 trials each (seeds: 2020), chosen on validation only: NoPE, Learned, ",
    ):
        assert part in words


@pytest.mark.filterwarnings("error::FutureWarning")
def test_a_report_of_nothing_yet(results):
    runs = results.runs[["row", "seed"]].assign(status="waiting")
    empty = Results(results.plan, runs)
    none = compare_rows(empty, empty.plan.tables[0])
    words = words_of(render_report(empty))
    assert "No run has finished yet." in words and "0 of 3" in render_markdown(empty)
    assert draw_charts(empty, none) == [] and tabulate([none]).empty
