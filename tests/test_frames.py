"""From a frame to a trained model: the same bits as from a file, and objects that stand alone."""

import gc
import json
import re
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from conftest import SMALL, make_log, run_python
from pyarrow import parquet

import recbole_pos as rp
from recbole_pos.errors import RunWarning, UsageError
from recbole_pos.experiment.callbacks import LOGGERS, MetricLogger

MEASURED = {"topk": [5], "valid_metric": "NDCG@5"}
UNTRAINED = {**MEASURED, "verbose": False}
SHORT = {**SMALL, **UNTRAINED}


def orders() -> pd.DataFrame:
    """Return the log of conftest.py in the types that frames have, with three cells missing."""
    frame = make_log()
    number = frame["item_id"].str[1:].astype(int)
    frame["user_id"] = frame["user_id"].astype("string")
    frame["item_id"] = pd.Categorical(frame["item_id"])
    times = pd.to_datetime(frame["timestamp"] + 0.5, unit="s", utc=True)
    frame["timestamp"] = times.dt.tz_convert("Europe/Oslo")
    frame["brand"] = pd.Categorical(number.map("b{}".format).str[:2])
    frame["amount"] = [Decimal(n) / 4 for n in range(len(frame))]
    frame["quantity"] = pd.array(np.arange(len(frame)) % 5, dtype="Int64")
    frame["rating"] = np.random.default_rng(0).random(len(frame))
    for row, column in ((3, "quantity"), (5, "user_id"), (7, "rating")):
        frame.loc[row, column] = None
    return frame


def items_of(frame: pd.DataFrame) -> pd.DataFrame:
    one = frame.drop_duplicates("item_id")[["item_id"]].reset_index(drop=True)
    tags = [["warm", "red"][: n % 3] for n in range(len(one))]
    return one.assign(item_id=one["item_id"].astype(str), tags=tags)


KINDS = {
    "pandas": lambda frame: frame,
    "pyarrow": pa.Table.from_pandas,
    "polars": lambda frame: pytest.importorskip("polars").from_pandas(frame),
    "duckdb": lambda frame: pytest.importorskip("duckdb").from_arrow(pa.Table.from_pandas(frame)),
}


def files(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in folder.iterdir() if one.suffix != ".json"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_equals_its_file(kind: str, tmp_path: Path) -> None:
    frame = orders()
    parquet.write_table(pa.Table.from_pandas(frame), tmp_path / "orders.parquet")
    parquet.write_table(pa.Table.from_pandas(items_of(frame)), tmp_path / "items.parquet")
    others = {"items": tmp_path / "items.parquet", "data_path": tmp_path / "file"}
    report = rp.convert(tmp_path / "orders.parquet", name="shop", verbose=False, **others)
    frame, items = KINDS[kind](frame), KINDS[kind](items_of(frame))
    with pytest.warns(RunWarning, match="no user .user_id.: 1, first interactions:5"):
        data = rp.Dataset.from_frame(frame, items=items, path=tmp_path / "made" / "shop")
    assert files(data.path) == files(tmp_path / "file" / "shop")
    assert set(files(data.path)) == {"shop.inter", "shop.item", "shop.yaml"}
    for one, other in zip(data.report.columns, report.columns, strict=True):
        same: dict[str, Any] = {"file": "", "notes": []}
        assert replace(one, **same) == replace(other, **same)
    assert data.counts == report.counts and data.counts["events"] == len(orders()) - 1
    dropped = data.report.lines["events"].dropped
    assert dropped == {"no user (user_id)": {"lines": 1, "first": ["interactions:5"]}}


def test_frames_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block of docs/data.md reads what a spreadsheet has."""
    polars = pytest.importorskip("polars")
    sheet = polars.DataFrame(
        {
            "customer": ["ann", "ann", "bob"],
            "product": ["owl", "kite", "owl"],
            "bought_at": ["Mar 2, 2024", "Mar 2, 2024", "Jul 2, 2024"],
            "price": ["$1,234.50", "$3", "$1,234.50"],
        }
    )
    monkeypatch.setattr(polars, "read_excel", lambda path: sheet)
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parent.parent / "docs" / "data.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(import polars.*?)```", page, re.DOTALL)
    exec(block, {})
    written = pd.read_csv("dataset/shop/shop.inter", sep="\t")
    assert written["item_id:token"].tolist() == ["owl", "kite", "owl"]
    midnights = pd.to_datetime(["2024-03-02", "2024-03-02", "2024-07-02"])  # UTC
    assert written["timestamp:float"].tolist() == [stamp.timestamp() for stamp in midnights]
    assert pd.read_csv("dataset/shop/shop.item", sep="\t")["price:float"].tolist() == [1234.5, 3]


def test_what_is_no_frame_of_interactions() -> None:
    frame = make_log()
    for given, word in (
        (frame.to_dict(), "dict"),
        (frame["user_id"], "found Series"),
        (frame.iloc[:0], "no row"),
        (pd.concat([frame, frame["item_id"]], axis=1), "Duplicate column names"),
    ):
        with pytest.raises(UsageError, match=word):
            rp.Dataset.from_frame(given)
    with pytest.raises(UsageError, match="from_frame"):
        rp.run("Pop", frame)
    with pytest.raises(TypeError, match="usr"):
        rp.Dataset.from_frame(frame, usr="user_id")


@pytest.fixture(scope="module")
def fitted() -> rp.Recommender:
    data = rp.Dataset.from_frame(make_log(), user="user_id", item="item_id", time="timestamp")
    return rp.fit("PosSASRec", data, **SHORT)


def test_names_that_were_read_as_floats() -> None:
    """As pandas has whole numbers of a column with empty cells."""
    frame = make_log()
    for name in ("user_id", "item_id"):
        frame[name] = frame[name].str[1:].astype(float)
    model = rp.fit("PosSASRec", rp.Dataset.from_frame(frame), **SHORT)
    expected = model.recommend(users=["5", "7"], k=3)
    assert model.recommend(users=np.array([5.0, 7.0]), k=3).equals(expected)
    expected = model.recommend(histories=[["3", "4"]], k=3)
    assert model.recommend(histories=[np.array([3.0, 4.0])], k=3).equals(expected)


def test_fit_equals_run(fitted: rp.Recommender, tmp_path: Path) -> None:
    """The bits of a run over a file of the same data, with the same recommendations."""
    make_log().to_csv(tmp_path / "log.csv", index=False)
    rp.convert(tmp_path / "log.csv", name="data", data_path=tmp_path, verbose=False)
    options = {**SHORT, "data_path": str(tmp_path)}
    result = rp.run("PosSASRec", "data", run_dir=tmp_path / "run", **options)
    loaded = rp.load(tmp_path / "run")
    for name, weights in loaded.model.state_dict().items():
        assert torch.equal(weights, fitted.model.state_dict()[name]), name
    assert fitted.result.test == result.test == fitted.evaluate()["test"].to_dict()
    every = fitted.recommend(k=3)
    pd.testing.assert_frame_equal(every, loaded.recommend(k=3))
    assert len(every) == 3 * 60


def test_it_needs_nothing_of_where_it_was_trained(fitted: rp.Recommender, tmp_path: Path) -> None:
    expected = fitted.recommend(["u5", "u7"], k=4)
    fitted.save(tmp_path / "live")
    with pytest.raises(UsageError, match="live holds a run"):
        fitted.save(tmp_path / "live")
    (tmp_path / "live").rename(tmp_path / "moved")
    code = (
        "import sys\n"
        "import recbole_pos as rp\n"
        "saved = rp.load(sys.argv[1])\n"
        "assert saved.evaluate('MRR', topk=2, part='valid').size == 1\n"
        "print(*saved.recommend(['u5', 'u7'], k=4)['item'])"
    )
    folder = Path(fitted.config["data_path"])
    hidden = folder.rename(folder.with_name("away"))
    printed = run_python("-c", code, tmp_path / "moved")
    hidden.rename(folder)
    assert printed.split() == expected["item"].tolist()


def test_temporary_folders_go_with_their_objects() -> None:
    data = rp.Dataset.from_frame(make_log())
    model = rp.fit("Pop", data, **UNTRAINED)
    folders = [data.path, model.folder.path]
    del data
    assert all(folder.is_dir() for folder in folders)
    del model
    gc.collect()
    assert not any(folder.exists() for folder in folders)


def test_a_comparison_as_an_object(fitted: rp.Recommender, tmp_path: Path) -> None:
    options = {**UNTRAINED, "mask_history": False}  # PosSASRec ranks all items
    pop = rp.fit("Pop", fitted.resources[0], **options)
    both = rp.compare([fitted.folder.path, pop.folder.path], run_dir=tmp_path, verbose=False)
    assert set(both.table["row"]) == {"PosSASRec", "Pop"} and "ndcg@10" in set(both.table["metric"])
    valid_metric = fitted.config["valid_metric"].lower()  # that of curves, and so of the tables
    assert both.table["metric"].iloc[0] == valid_metric == "ndcg@5"
    assert both.results.curves["value"].max() == fitted.result.best_valid[valid_metric]
    assert "| Pop |" in repr(both) and ">Pop</th>" in both._repr_html_()
    assert both.plot()._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="^compare: epochs: not read"):
        rp.compare([fitted.folder.path, pop.folder.path], verbose=False, epochs=9)
    with pytest.raises(UsageError, match="expected the folders of two runs"):
        rp.compare([fitted.folder.path, "run"], verbose=False)


def test_runs_of_other_data_are_not_compared(tmp_path: Path) -> None:
    """The order of rows, and so of ids, makes no difference."""
    frame = make_log().sort_values("user_id", kind="stable")
    more = pd.concat([frame, frame[-1:].assign(user_id="once")])  # in training, and no target
    first, same, other = (
        rp.fit("Pop", rp.Dataset.from_frame(data), seed=seed, **UNTRAINED)
        for seed, data in enumerate((make_log(), frame, more))
    )
    pair = rp.compare([first.folder.path, same.folder.path], run_dir=tmp_path / "x", verbose=False)
    assert set(pair.table["seeds"]) == {2}
    with pytest.raises(UsageError, match="test targets are not the same"):
        rp.compare([first.folder.path, other.folder.path], run_dir=tmp_path / "y", verbose=False)


def test_callbacks(fitted: rp.Recommender, tmp_path: Path) -> None:
    """This one ends the training after the first epoch."""
    answers = {"on_validation.return_value": None, "on_epoch.return_value": True}
    callback, data = Mock(spec=rp.Callback, **answers), fitted.resources[0]
    given = {**SHORT, "epochs": 9, "callbacks": [callback], "run_dir": tmp_path}
    num_steps = len(rp.fit("PosSASRec", data, **given).loaders["train"])
    called = [name for name, _, _ in callback.method_calls]
    assert called == ["on_start", *["on_step"] * num_steps, "on_validation", "on_epoch", "on_end"]
    assert [call.args[0] for call in callback.on_step.mock_calls] == [*range(1, num_steps + 1)]
    epoch, metrics = callback.on_validation.call_args.args
    assert epoch == callback.on_epoch.call_args.args[0]["epoch"] == 0 and "hit@5" in metrics
    assert callback.on_end.call_args.args[1].epochs == 1
    assert rp.run(resume=tmp_path, verbose=False).epochs == 1  # it was ended, not interrupted


class Tracker(MetricLogger):
    """Notes how runs begin and end."""

    seen: ClassVar[list[Any]] = []

    def begin(self, config: Any, folder: Path, tags: dict[str, str]) -> None:
        self.seen.append(tags["dataset_checksum"])

    def end(self, is_finished: bool) -> None:
        self.seen.append(is_finished)


def test_loggers(fitted: rp.Recommender, tmp_path: Path, monkeypatch: Any) -> None:
    """They get the numbers of the run, with tags; a run that fails is ended, too."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setitem(LOGGERS, "wandb", Tracker)
    data, checksum = fitted.resources[0], fitted.dataset.identity["data"][:16]
    options = {**SHORT, "logger": ["tensorboard", "wandb"]}
    model = rp.fit("PosSASRec", data, run_dir=tmp_path / "run", **options)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    expected = pytest.approx([json.loads(line)["valid"]["ndcg@5"] for line in lines])
    tested = model.result.test["ndcg@5"]

    board = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [one.value for one in board.Scalars("valid/ndcg@5")] == expected
    found = [(one.step, one.value) for one in board.Scalars("test/ndcg@5")]
    assert found == [(model.result.best_epoch, pytest.approx(tested))]

    fails = type("Fails", (rp.Callback,), {"on_epoch": lambda self, epoch: 1 / 0})()
    with pytest.raises(ZeroDivisionError):
        rp.fit("PosSASRec", data, callbacks=[fails], **options)
    assert Tracker.seen == [checksum, True, checksum, False]
