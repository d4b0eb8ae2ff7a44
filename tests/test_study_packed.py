"""Studies in files: the same tables without training, what is left to train, and strangers' packs.

One small study is trained for all of them.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from conftest import make_log, write_atomic
from small_study import study

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.errors import UsageError
from recbole_pos.study.packed import PackedStudy

Files = dict[str, bytes]
SPACE = {"trials": 2, "space": {"learning_rate": {"loguniform": [1e-4, 1e-2]}, "n_heads": 1}}
ROWS = {"NoPE": {"position": ["nope"]}, "Pop": {"model": "Pop", "search": False}}


@pytest.fixture(scope="module")
def made(cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A study, its file, the folder where it was trained, its pack, and a folder made of both."""
    root = tmp_path_factory.mktemp("packed")
    what = study(write_atomic(make_log(), root), rows=ROWS, search=SPACE)
    here, there, pack = root / "here", root / "there", root / "kept" / "study"
    (root / "study.json").write_text(json.dumps(what))
    compare(what, run_dir=here, pack=pack)
    command = ["compare", root / "study.json", "--known", pack, "--report", "--run_dir", there]
    assert main(list(map(str, command))) == 0
    found = {"what": what, "file": root / "study.json", "here": here, "there": there}
    return {**found, "pack": pack}


def compare(what: Any, **given: Any) -> Any:
    return recbole_pos.compare(what, **{"verbose": False, **given})


def content(folder: Path) -> Files:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_same_tables_without_training(made: dict, tmp_path: Path) -> None:
    """Elsewhere, without weights: tables, values of each run and ranks; packed again, the pack."""
    there, here = tmp_path / "there", made["here"]
    again = tmp_path / "again"
    runs, _ = compare(made["what"], run_dir=there, known=(made["pack"],), report=True, pack=again)
    assert list(runs["status"]) == ["done"] * 4 and set(runs["known_from"]) == {"study"}
    assert (there / "table.md").read_text() == (here / "table.md").read_text()
    one, two = (pd.read_csv(place / "runs.csv") for place in (here, there))
    pd.testing.assert_frame_equal(one.drop(columns="known_from"), two.drop(columns="known_from"))
    ranks = list(here.glob("runs/*/test_ranks.parquet"))
    for file in ranks:
        assert (there / file.relative_to(here)).read_bytes() == file.read_bytes()
    assert len(ranks) == 4 and not list(there.rglob("checkpoint.pt"))
    for file in ("facts.json", "epochs.parquet", "ranks.parquet"):
        assert (again / file).read_bytes() == (made["pack"] / file).read_bytes()


def test_only_what_is_missing_is_trained(made: dict, tmp_path: Path) -> None:
    """A seed more: its runs are trained, the search and the other seeds are not."""
    there = tmp_path / "there"
    found = compare({**made["what"], "seeds": 3}, run_dir=there, known=(made["pack"],))
    new = found.runs[found.runs["known_from"].fillna("") == ""]
    assert list(new["seed"]) == [2022, 2022] and set(new["status"]) == {"done"}
    assert {path.parent.name for path in there.rglob("checkpoint.pt")} == set(new["digest"])


def test_other_data_and_split(cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``-d``: the same rows on another dataset; ranks find targets that are several of a user."""
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "other"):
        write_atomic(make_log(seed=len(name)), tmp_path / "dataset", name)
    what = study(tmp_path, rows={"Pop": {"model": "Pop"}, "Last": {"model": "SPop"}}, seeds=1)
    split = {"order": "TO", "mode": "full", "split": {"GT": [0.7, 0.85]}}
    what["base"] = {"eval_args": {**split, "cold_items": "drop", "ties": "drop"}}
    Path("my.yaml").write_text(yaml.safe_dump(what), encoding="utf-8")
    found = compare("my.yaml", dataset="other", run_dir="made", pack="my")
    assert list(found.runs["status"]) == ["done", "done"], list(found.runs["reason"])
    assert compare("made", dataset="other", report=True).runs.equals(found.runs)
    compare("my.yaml", dataset="other", run_dir="there", known=("my",), report=True)
    for ranks in Path("made").glob("runs/*/test_ranks.parquet"):
        assert ("there" / ranks.relative_to("made")).read_bytes() == ranks.read_bytes()
    with pytest.raises(UsageError, match="made is a study of other"):
        compare("made", dataset="tiny", report=True)


def test_nothing_of_the_log_or_the_machine_is_in_it(made: dict, tmp_path: Path) -> None:
    """No user, item or time, no weights, no reasons, and no place of the machine that trained."""
    folder = Path(shutil.copytree(made["here"], tmp_path / "copy"))
    file = next(folder.glob("runs/*/fit.json"))
    more = {"reason": "/home/me is full", "split": {"boundaries": [1715729063.4]}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    compare(folder, report=True, pack=tmp_path / "kept")
    files = content(tmp_path / "kept")
    for word in (str(made["here"].parent), "/home/me", "1715729063"):
        assert word.encode() not in b"".join(files.values())
    tables = [
        pd.read_parquet(tmp_path / "kept" / f"{name}.parquet") for name in ("epochs", "ranks")
    ]
    digests = set(PackedStudy(tmp_path / "kept").fits)
    assert set(tables[0]["digest"]) | set(tables[1].columns) == digests


def test_other_data_or_options_know_nothing(made: dict, tmp_path: Path, capsys) -> None:
    """And the dry run says so before anything is trained."""
    what, pack = made["what"], made["pack"]
    write_atomic(make_log(seed=1), tmp_path)
    changes = ({"data_path": str(tmp_path)}, {"n_layers": 2}, {})
    # Pop reads no n_layers: its runs are the same
    for more, known in zip(changes, (0, 2, 6), strict=True):
        other = {**what, "base": {**what["base"], **more}}
        compare(other, run_dir=tmp_path / "s", known=(pack,), dry_run=True, verbose=True)
        assert f"{known} of its 6 runs are of this study" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "restored"),
    [
        ({"rows": {**ROWS, "NoPE": {"position": ["rope"]}}}, 2),
        ({"search": {**SPACE, "trials": 5}}, 4),
    ],
    ids=["another row", "more trials"],
)
def test_a_report_samples_nothing(made: dict, tmp_path: Path, change: dict, restored: int) -> None:
    """What another search sampled is not taken, and one with more trials has not chosen yet."""
    what = {**made["what"], **change}
    runs, _ = compare(what, run_dir=tmp_path / "s", known=(made["pack"],), report=True)
    assert list(runs["row"]) == ["Pop", "Pop"]
    assert len(list((tmp_path / "s").glob("runs/*"))) == restored


def test_attaching_to_a_run_without_weights_fails(made: dict, tmp_path: Path) -> None:
    """Not even where a checkpoint lies that was not finished: it is not one of the known run."""
    there = Path(shutil.copytree(made["there"], tmp_path / "there"))
    for run in (there / "runs").iterdir():
        (run / "checkpoint.pt").touch()
    attach = {"attach": {"to": "NoPE", "schemes": ["kernel"]}}
    what = {**made["what"], "rows": {**ROWS, "kernel": attach}}
    runs, _ = compare(what, run_dir=there, known=(made["pack"],))
    runs = runs.set_index("row")
    assert list(runs.loc["NoPE", "status"]) == ["done"] * 2
    assert set(runs.loc["kernel", "status"]) == {"failed"}
    assert "--known" in runs.loc["kernel", "reason"].iloc[0]


def test_a_dry_run_tells_what_is_there_from_what_is_new(made: dict, tmp_path: Path, capsys) -> None:
    def preview_text(what: dict, folder: Path, **more: Any) -> str:
        before = content(folder)
        compare(what, run_dir=folder, dry_run=True, verbose=True, **more)
        assert content(folder) == before
        return " ".join(capsys.readouterr().out.split())

    what = made["what"]
    folder = Path(shutil.copytree(made["here"], tmp_path / "s"))
    assert "2 configurations, 2 seeds, 5 runs" in (text := preview_text(what, folder))
    assert "5 finished" in text
    noted = json.loads((folder / "current.json").read_text())
    run = folder / "runs" / noted["NoPE, seed 2021"]["run"]
    fit = json.loads((run / "fit.json").read_text())
    (run / "fit.json").write_text(json.dumps({**fit, "status": "running"}))
    assert "4 finished, 1 to resume from a checkpoint" in preview_text(what, folder)
    shutil.rmtree(run)
    assert "4 finished, 1 to be trained" in preview_text(what, folder)
    trial = folder / "runs" / noted["NoPE, trial 1"]["run"]
    shutil.rmtree(trial)  # what it chooses is not known before
    text = preview_text(what, folder)
    assert "3 finished, 1 to be trained, 1 that a search decides first" in text
    assert "1 configuration, 2 seeds, 2 runs" in preview_text(what, folder, rows=("Pop",))


def test_arguments_that_do_not_fit_leave_no_folder(made: dict, tmp_path: Path, monkeypatch) -> None:
    what, here = made["what"], made["here"]
    monkeypatch.chdir(tmp_path)
    longer = {**what, "base": {**what["base"], "epochs": 3}}
    warm = {**what, "search": None, "rows": {"Warm": {"init_from": str(here)}}}
    runs = sorted(made["there"].glob("runs/*"))[:2]
    for message, one, given in (
        ("'tinny'", what, {"dataset": "tinny", "run_dir": "a"}),
        ("--report: .* no finished run", longer, {"run_dir": here, "report": True}),
        ("init_from", warm, {"run_dir": "a"}),
        ("compare: known: not read", runs, {"known": (made["pack"],)}),
        ("taken from study", runs, {}),
    ):
        with pytest.raises(UsageError, match=message):
            compare(one, **given)
    assert not list(tmp_path.iterdir())


def changed(**fields: Any) -> Callable[[bytes], bytes]:
    return lambda old: json.dumps({**json.loads(old), **fields}).encode()


def becomes(content: Any) -> Callable[[bytes], bytes | None]:
    return lambda old: content


def best_of_all(ranks: bytes) -> bytes:
    return pd.read_parquet(io.BytesIO(ranks)).assign(rank=0).to_parquet()


def of_runs(**fields: Any) -> Callable[[bytes], bytes]:
    """Change facts of every run in a pack that has them."""

    def change(old: bytes) -> bytes:
        runs = json.loads(old)
        for facts in runs.values():
            facts.update({key: value for key, value in fields.items() if facts.get(key)})
        return json.dumps(runs).encode()

    return change


@pytest.mark.parametrize(
    ("file", "field", "change"),
    [
        ("facts.json", "parameters", of_runs(parameters=10**400)),
        ("facts.json", "precision@10", of_runs(test={"precision@10": 0.9})),
        ("facts.json", "", becomes(b"[1]")),
        ("facts.json", "MiB", lambda old: old + b" " * 2**24),
        ("epochs.parquet", "", becomes(b"PAR1")),
        ("ranks.parquet", "", becomes(b"PAR1")),
        ("ranks.parquet", "no ranks", lambda old: pd.DataFrame({"x": [1]}).to_parquet()),
        ("ranks.parquet", "@", lambda old: (0 * pd.read_parquet(io.BytesIO(old))).to_parquet()),
        ("ranks.parquet", "2 ranks", lambda old: pd.read_parquet(io.BytesIO(old))[:2].to_parquet()),
    ],
)
def test_a_damaged_pack_leaves_the_study_as_it_was(
    made: dict, file: str, field: str, change: Callable, tmp_path: Path, refused
) -> None:
    """The file is named, and nothing of the pack reaches the tables."""
    pack = Path(shutil.copytree(made["pack"], tmp_path / "pack"))
    (pack / file).write_bytes(change((pack / file).read_bytes()))
    file = "ranks.parquet" if "precision" in field else file  # ranks that it does not follow from
    command = ["compare", made["file"], "--known", pack, "--report", "--run_dir", tmp_path / "new"]
    refused(command, file, field)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("file", "field", "change"),
    [
        ("fit.json", "test.row", changed(test={"row": 1})),
        ("fit.json", "request_time", changed(request_time={"a": [1]})),
        ("metrics.jsonl", "epoch", becomes(b'{"epoch": "one"}\n')),
        ("metrics.jsonl", "ndcg@10", becomes(b'{"epoch": 0, "valid": {"ndcg@10": 1e308}}\n')),
        ("test_ranks.parquet", "", becomes(b"PAR1")),
        ("test_ranks.parquet", "@", best_of_all),
        ("facts.json", "ties", changed(ties={"users": 1})),
        ("facts.json", "ties", changed(ties={"users": 0, "test": 5})),
        ("current.json", "run", lambda old: old.replace(b'"run": "', b'"run": "../')),
        ("study.json", "content", changed(content=[1])),
    ],
)
def test_damage_in_a_study_is_named(
    made: dict, file: str, field: str, change: Callable, tmp_path: Path, refused
) -> None:
    there = Path(shutil.copytree(made["there"], tmp_path / "there"))
    current = json.loads((there / "current.json").read_text())["NoPE, seed 2021"]["run"]
    path = next(path for path in there.rglob(file) if path.parent.name in (current, "there"))
    path.write_bytes(change(path.read_bytes()))
    refused(["compare", there, "--report"], str(path), field)


def test_metrics_follow_from_ranks_whatever_a_run_says_of_its_decimals(
    made: dict, tmp_path: Path, refused
) -> None:
    there = Path(shutil.copytree(made["there"], tmp_path / "there"))
    file = next(there.rglob("test_ranks.parquet"))
    file.write_bytes(best_of_all(file.read_bytes()))
    config = file.with_name("config.yaml")
    options = yaml.safe_load(config.read_text())
    for decimals in (-5, 1, "x", -(10**400)):
        config.write_text(yaml.safe_dump({**options, "metric_decimal_place": decimals}))
        refused(["compare", there, "--report"], str(file), "@")


def test_what_is_no_pack_is_refused(made: dict, tmp_path: Path, refused) -> None:
    for path in (made["file"], tmp_path, tmp_path / "nowhere"):
        refused(["compare", made["file"], "--known", path, "--run_dir", tmp_path / "s"], "--known")
