"""Datasets: what is read of them, parts that files give, kinds of targets; against loops."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import shop
import torch
from conftest import make_log, small, write_atomic

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.protocol import make_warnings
from recbole_pos.data.recbole_view import make_views
from recbole_pos.data.splits import PHASES, TRAIN
from recbole_pos.data.targets import _find_values
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import Experiment, prepare, read_dataset
from recbole_pos.position.schemes import SCHEMES


def test_pop_counts_training_events(experiment) -> None:
    """All of a batch, where RecBole's own counts an item once."""
    made = experiment("Pop", epochs=1)
    made.trainer.fit(made.loaders["train"], made.loaders["valid"])
    log, part = made.dataset.log, made.dataset.part
    counts = np.bincount(log.items.numpy()[part == TRAIN], minlength=made.dataset.item_num)
    assert counts.max() > 5
    np.testing.assert_array_equal(made.model.item_cnt[:, 0].numpy(), counts)
    assert made.loaders["train"]._dataset.inter_matrix("csr").sum() == counts.sum()


@pytest.mark.parametrize("chosen", [{"normalize_all": True}, {"normalize_field": ["price", "v"]}])
def test_numbers_and_vectors_are_normalized_times_exact(tmp_path: Path, chosen: dict) -> None:
    """Also of the missing: the mean of the others, a vector of zeros."""
    made = shop.tables(users=20)
    numbers = np.random.default_rng(0).normal(size=(len(made["item"]), 3)).round(3)
    made["item"]["v:float_seq"] = [" ".join(map(str, row)) for row in numbers]
    made["item"].loc[0, "v:float_seq"] = ""
    low, high = numbers[1:].min(), numbers[1:].max()
    load = {**shop.LOAD, "item": ["item_id", "price", "v"]}
    given = {"data_path": str(shop.write(tmp_path, made)), "load_col": load}
    plain, other = (
        read_dataset(PosConfig("PosSASRec", "shop", None, {**given, **more}, strict=False))
        for more in ({}, chosen)
    )
    assert torch.equal(plain.log.times, other.log.times)
    price, vectors = plain.item_feat["price"], (plain.item_feat["v"].double() - low) / (high - low)
    vectors[[0, plain.field2token_id["item_id"][made["item"]["item_id:token"][0]]]] = 0
    torch.testing.assert_close(other.item_feat["v"], vectors.float(), rtol=0, atol=1e-6)
    scaled = (price - price.min()) / (price.max() - price.min())
    torch.testing.assert_close(other.item_feat["price"], scaled, rtol=0, atol=1e-6)


def test_missing_times_are_an_error(tmp_path: Path) -> None:
    frame = make_log(users=10)
    frame.loc[[3, 5], "timestamp"] = np.nan, np.inf
    with pytest.raises(UsageError, match="2 of .* no finite 'timestamp'"):
        read(write_atomic(frame, tmp_path), None)


THREE = ["train", "valid", "test"]
SAMPLE = ["user_id", "item_id", "timestamp"]


def write_parts(parts: dict[str, pd.DataFrame], folder: Path, name: str = "tiny") -> Path:
    """folder/<name>/<name>.<part>.inter; returns folder."""
    for part, frame in parts.items():
        write_atomic(frame, folder, name)
        file = folder / name / f"{name}.inter"
        file.rename(file.with_name(f"{name}.{part}.inter"))
    return folder


def read(folder: Path, files: list[str] | None, model: str = "FPARec", **more: Any) -> Any:
    given = {"data_path": str(folder), "benchmark_filename": files, **more}
    dataset = read_dataset(PosConfig(model, "tiny", None, given))
    dataset.parts = make_views(dataset)
    return dataset


def predicted(dataset: Any) -> set[tuple[str, str, str, tuple[str, ...]]]:
    """Phase, user, target and history of every target, by name."""
    log, split = dataset.log, dataset.split
    users = dataset.field2id_token["user_id"][log.users.numpy()]
    items = dataset.field2id_token["item_id"][log.items.numpy()].tolist()
    return {
        (THREE[split.part[n]], users[n], items[n], tuple(items[log.starts[n] : n]))
        for n in np.flatnonzero(split.is_target)
    }


@pytest.fixture
def log() -> pd.DataFrame:
    """No two interactions of a user at one time."""
    frame = make_log(seed=4)
    frame["timestamp"] = np.random.default_rng(0).permutation(len(frame)) + 1.5e9
    return frame


def last_first(log: pd.DataFrame) -> pd.Series:
    """0 for the last interaction of a user, 1 for the one before it, ..."""
    return log.groupby("user_id")["timestamp"].rank(ascending=False).astype(int) - 1


@pytest.mark.parametrize(("model", "drop"), [("FPARec", "drop"), ("Pop", "keep")])
def test_leave_one_out_in_files(log: pd.DataFrame, tmp_path: Path, model: str, drop: str) -> None:
    """The same targets and histories as of one file, and of two files of which the first is cut."""
    sizes = log.groupby("user_id")["user_id"].transform("size")
    log = log[sizes != 3]
    place = last_first(log).where(sizes >= 4, 9)
    parts = {"train": place > 1, "valid": place == 1, "test": place == 0}
    write_atomic(log, tmp_path / "one")
    write_parts({name: log[mask] for name, mask in parts.items()}, tmp_path / "three")
    write_parts({"train": log[place > 0], "test": log[place == 0]}, tmp_path / "two")
    protocol = {"eval_args": {"cold_items": drop}}
    want = read(tmp_path / "one", None, model, **protocol)
    three = read(tmp_path / "three", THREE, model, **protocol)
    two = read(tmp_path / "two", ["train", "test"], model, **protocol)
    assert predicted(three) == predicted(want)
    assert {t for t in predicted(want) ^ predicted(two) if t[0] != "valid"} == set()
    assert {t[:2] for t in predicted(two)} == {t[:2] for t in predicted(want)}
    for name in ("events", "targets", "dropped", "cold_targets"):
        assert three.split.summary[name] == want.split.summary[name]
    counted = three.split.summary["leaks"]
    for name in ("in_earlier_part", "before_earlier_part"):
        assert counted[name] == {"valid": 0, "test": 0}


def leaking(log: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Files of which test has interactions of training, and others that are older."""
    place = last_first(log)
    train, test = log[place > 2], log[place <= 1].copy()
    return {"train": train, "valid": log[place == 2], "test": pd.concat([test, train.iloc[::9]])}


def test_histories_end_with_earlier_files(log: pd.DataFrame, tmp_path: Path) -> None:
    """Against loops over the rows of the files, which leak; so do the counts."""
    parts = leaking(log)
    dataset = read(write_parts(parts, tmp_path), THREE)
    want, repeated, early = set(), 0, 0
    for phase, frame in parts.items():
        earlier = THREE[: THREE.index(phase)]
        for user, rows in frame.sort_values("timestamp").groupby("user_id"):
            before = pd.concat(
                [parts[p][parts[p]["user_id"] == user].sort_values("timestamp") for p in earlier]
                + [rows.iloc[:0]]
            )
            for n, row in enumerate(rows.itertuples()):
                history = [*before["item_id"], *rows["item_id"][:n]]
                if history:
                    want.add((phase, user, row.item_id, tuple(history)))
                if phase == "test":
                    early += bool(len(before) and row.timestamp < before["timestamp"].max())
                    repeated += bool((before[SAMPLE] == list(row[1:4])).all(axis=1).any())
    assert predicted(dataset) == want
    found = dataset.split.summary["leaks"]
    assert found["in_earlier_part"] == {"valid": 0, "test": repeated} and repeated > 5
    assert found["before_earlier_part"] == {"valid": 0, "test": early} and early > 5
    assert sum("benchmark_filename" in text for text in make_warnings(dataset.split.summary)) == 2
    windows = dataset.make_training_windows()
    for start, end in zip(windows.start, windows.end, strict=True):
        assert (dataset.part[start : end + 1] == TRAIN).all()


@pytest.mark.parametrize(
    ("model", "options"),
    [
        *(("PosSASRec", {"position": [name]}) for name in SCHEMES if SCHEMES[name].assumes_order),
        ("AttrFormer", {"relations": ["time"]}),
    ],
    ids=str,
)
def test_what_assumes_an_order_in_time_refuses_times_that_fall(
    log: pd.DataFrame, tmp_path: Path, model: str, options: dict[str, Any]
) -> None:
    """From one given part to the next; sums in chunks depended on the chunk."""
    is_valid = last_first(log) == 1
    write_parts({"train": log[~is_valid], "valid": log[is_valid]}, tmp_path)
    given = {"data_path": str(tmp_path), "benchmark_filename": ["train", "valid"], **options}
    with pytest.raises(UsageError, match=r"'timestamp': the times of \d+ users fall"):
        prepare(small(model, **given))


BY_TIME = {"eval_args": {"split": {"GT": [0.9]}}}
BY_SESSION = {"eval_args": {"split": {"ST": [0.9]}}, "train_fraction": "1/4"}


@pytest.mark.parametrize(
    ("files", "options", "words"),
    [
        (THREE, BY_TIME, "benchmark_filename give all three parts"),
        (["train"], {}, "benchmark_filename: expected names of three different parts"),
        (["train", "train"], {}, "benchmark_filename: expected names of three different parts"),
        (["train", "tets"], {}, r"benchmark_filename.*tiny\.tets\.inter"),
        (["train", "test"], BY_SESSION, "train_fraction.* only without benchmark_filename"),
    ],
)
def test_what_cannot_be_a_given_split(
    log: pd.DataFrame, tmp_path: Path, files: list[str], options: dict[str, Any], words: str
) -> None:
    folder = write_parts(leaking(log), tmp_path)
    with pytest.raises(UsageError, match=words):
        read(folder, files, **options)


def test_given_parts_must_have_the_same_columns(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    for part, kind in (("train", "float"), ("test", "token")):
        lines = f"user_id:token\titem_id:token\ttimestamp:float\tr:{kind}\nu1\ti1\t1\t5\n"
        (tmp_path / "tiny" / f"tiny.{part}.inter").write_text(lines)
    load_col = {"inter": ["user_id", "item_id", "timestamp", "r"]}
    with pytest.raises(UsageError, match=r"tiny\.test\.inter: loaded are .*r:token, but"):
        read(tmp_path, ["train", "test"], load_col=load_col)


def twice(log: pd.DataFrame) -> pd.DataFrame:
    """Every second interaction is logged twice, each user's last among them."""
    return pd.concat([log, log[last_first(log) % 2 == 0]]).sample(frac=1, random_state=0)


def test_copies_are_counted_and_warned_of(log: pd.DataFrame, tmp_path: Path, capsys) -> None:
    """Copies, and held-out targets that are some; ``rm_copies`` gives the data without them."""
    clean, doubled = tmp_path / "clean", tmp_path / "doubled"
    write_atomic(log, clean)
    write_atomic(twice(log), doubled)
    run = recbole_pos.run("Pop", "tiny", data_path=str(doubled), run_dir=tmp_path / "run")
    dataset = read(doubled, None)
    summary = dataset.split.summary
    assert sum(summary["copies"].values()) == len(twice(log)) - len(log)
    assert run.split == summary and len(run.warnings) == 2  # copies, which are repeated targets
    test = [t for t in predicted(dataset) if t[0] == "test"]
    assert summary["copied_targets"]["test"] == sum(t[2] == t[3][-1] for t in test) > 40
    assert run.warnings[0] in capsys.readouterr().out.split("best epoch")[1]
    cleaned = read(doubled, None, rm_copies=True)
    assert predicted(cleaned) == predicted(read(clean, None))
    assert sum(cleaned.split.summary["copies"].values()) == 0


def test_what_is_as_old_as_an_earlier_file_is_not_older(tmp_path: Path) -> None:
    parts = {"train": [1.0, 2.0], "valid": [2.0, 3.0], "test": [2.5, 3.0]}
    frames = {
        part: pd.DataFrame([("u", f"{part}{t}", t) for t in times], columns=SAMPLE)
        for part, times in parts.items()
    }
    found = read(write_parts(frames, tmp_path), THREE).split.summary["leaks"]
    assert found["before_earlier_part"] == {"valid": 0, "test": 1}


def test_copies_between_others_at_their_time(tmp_path: Path) -> None:
    """A B A B at one time: two copies, none of which stands behind its original."""
    rows = [("u", item, 1.0) for item in "abab"] + [("v", "a", 1.0), ("v", "a", 2.0)]
    write_atomic(pd.DataFrame(rows, columns=SAMPLE), tmp_path)
    summary = read(tmp_path, None, eval_args={"split": {"LS": "test_only"}}).split.summary
    assert summary["copies"] == {"train": 1, "valid": 0, "test": 1}
    assert summary["copied_targets"] == {"train": 1, "valid": 0, "test": 1}


LOAD = {"inter": ["user_id", "item_id", "timestamp", "kind", "stars"]}
BUY = {"kind": ["buy", "gift"]}


def log_of_kinds() -> pd.DataFrame:
    frame, rng = make_log(seed=5), np.random.default_rng(0)
    frame["kind"] = rng.choice(["view", "buy", "gift", ""], len(frame), p=[0.5, 0.3, 0.1, 0.1])
    frame["stars"] = rng.choice(["1", "4.5", "5", ""], len(frame))
    return frame


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_atomic(log_of_kinds(), tmp_path_factory.mktemp("kinds"), token_columns=["kind"])


def open_kinds(folder: Path, model: str = "PosSASRec", **options: Any) -> Experiment:
    given = {"target_events": BUY, "load_col": LOAD, "data_path": str(folder), **options}
    return prepare(small(model, **given))


def test_a_kind_that_only_test_has(tmp_path: Path) -> None:
    """Trials of general models, whose data have no test interactions, do without it."""
    frame = log_of_kinds().sort_values("timestamp").assign(kind="buy")
    frame.iloc[-20:, frame.columns.get_loc("kind")] = "gift"
    write_atomic(frame, tmp_path, token_columns=["kind"])
    given = {"target_events": BUY, "load_col": LOAD, "data_path": str(tmp_path)}
    assert _find_values("returned", [True], np.array([1]), np.array(["[PAD]", "true"]), True) == [1]
    dataset = read_dataset(small("BPR", eval_args={"split": {"GT": [0.6, 0.8]}}, **given))
    whole, reduced = make_views(dataset), make_views(dataset.without_test())
    assert len(reduced["train"]) == len(whole["train"])


@pytest.mark.parametrize(
    ("split", "wanted"),
    [({"LS": "valid_and_test"}, {"stars": [4.5, 5], "kind": ["view"]}), ({"GT": [0.6, 0.8]}, BUY)],
    ids=str,
)
def test_targets_are_those_of_the_kind(folder: Path, split: dict, wanted: dict) -> None:
    """In rows and in windows; histories are whole, and training ends before what is held out."""
    made = open_kinds(folder, eval_args={"split": split}, target_events=wanted)
    dataset, log = made.dataset, made.dataset.log
    kinds = dataset.field2id_token["kind"][log.fields["kind"]]
    is_wanted = log.has_history & np.isin(kinds, wanted["kind"])
    if "stars" in wanted:
        is_wanted &= np.isin(log.fields["stars"], wanted["stars"])
    np.testing.assert_array_equal(dataset.split.is_target, is_wanted)
    loader = made.loaders["train"]
    batches = [loader.gather(batch) for batch in loader._get_batches()]
    trained = set(np.flatnonzero(dataset.split.find_targets(0)))
    assert sum(map(len, batches)) == len(trained) == loader.num_targets
    for windows, batch in zip(loader._get_batches(), batches, strict=True):
        places = [e for w in windows for e in range(loader.windows.start[w], loader.windows.end[w])]
        assert batch.items.tolist() == log.items[places].tolist()  # all kinds
        after = range(len(places)) if batch.queries is None else batch.queries
        targets = [places[k] + 1 for k in after]
        assert trained.issuperset(targets)
        assert batch.targets.tolist() == log.items[targets].tolist()
    rows = next(iter(made.loaders["test"]))[0]
    target = rows["target_event"].numpy()
    assert rows["item_length"].tolist() == np.minimum(log.ranks[target], 12).tolist()
    assert (np.diff(dataset.part)[np.diff(log.users.numpy()) == 0] >= 0).all()
    summary = dataset.split.summary
    for phase in PHASES:
        parts = ("dropped", "without_history", "other_events", "not_chosen", "targets")
        assert sum(summary[key][phase] for key in parts) == summary["events"][phase]


def test_general_models_learn_from_these_only(folder: Path) -> None:
    made = open_kinds(folder, "BPR")
    train = made.loaders["train"]._dataset
    names = made.dataset.field2id_token["kind"]
    assert set(names[train.inter_feat["kind"]]) == {"buy", "gift"}
