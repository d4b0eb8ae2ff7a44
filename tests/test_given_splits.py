"""Parts that files give: who is predicted from what, what leaks, and exact copies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import SMALL, make_log, write_atomic

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import read_dataset

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
    dataset.parts = dict(zip(THREE, dataset.build(), strict=True))
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
def test_files_of_leave_one_out_are_leave_one_out(
    log: pd.DataFrame, tmp_path: Path, model: str, drop: str
) -> None:
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
    windows = dataset.parts["train"].make_training_windows()
    learned = np.concatenate(
        [dataset.part[s : e + 1] for s, e in zip(windows.start, windows.end, strict=True)]
    )
    assert (learned == 0).all()


def test_a_run_warns_of_leaks(log: pd.DataFrame, tmp_path: Path, capsys) -> None:
    """Beside the metrics and in result.json; models that read times get through."""
    write_parts(leaking(log), tmp_path)
    words = [f"--{key}={json.dumps(value)}" for key, value in SMALL.items()]
    words += [f"--data_path={tmp_path}", "--benchmark_filename=[train,valid,test]"]
    words += ["-m", "PosSASRec", "-d", "tiny", "--position=[rope, siren_rope]"]
    assert main(["run", *words, "--mask_history=True", f"--run_dir={tmp_path / 'run'}"]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert all(np.isfinite(value) for value in result["test"].values())
    assert result["split"]["leaks"]["in_earlier_part"]["test"] > 5
    assert len(result["warnings"]) == 3
    printed = capsys.readouterr().out
    assert all(text in printed.split("best epoch")[1] for text in result["warnings"])
    assert len(recbole_pos.recommend(tmp_path / "run", k=2))


def test_what_cannot_be_a_given_split(log: pd.DataFrame, tmp_path: Path) -> None:
    folder = write_parts(leaking(log), tmp_path)
    by_time = {"eval_args": {"split": {"GT": [0.9]}}}
    with pytest.raises(UsageError, match="benchmark_filename"):
        read(folder, THREE, **by_time)
    for files in (["train"], [*THREE, "more"], ["train", "train"], "train", ["train", 3]):
        with pytest.raises(UsageError, match="benchmark_filename"):
            read(folder, files)
    with pytest.raises(UsageError, match=r"benchmark_filename.*tiny\.tets\.inter"):
        read(folder, ["train", "tets"])
    read(folder, ["train", "test"], **by_time)


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
    assert run.split == summary and len(run.warnings) == 1
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
