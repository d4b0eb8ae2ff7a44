"""Studies that are trained: every fit once, kept, continued, tested alike, shown."""

import importlib
import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from small_study import BASE, NOPE, SMALL, study
from spy import notes

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.errors import UsageError
from recbole_pos.files import lock_folder
from recbole_pos.model.models import MODELS, register_model
from recbole_pos.model.sasrec import PosSASRec
from recbole_pos.study.configs import digest_run, make_row_config
from recbole_pos.study.study_folder import StudyFolder
from recbole_pos.yaml_files import read_yaml


def compare(given: Any, folder: Path, **more: Any) -> Any:
    return recbole_pos.compare(given, run_dir=folder, verbose=False, **more)


def times(folder: Path) -> dict[str, float]:
    """When each run that the study noted as finished was last written."""
    done = [p.parent for p in folder.glob("runs/*/fit.json") if '"done"' in p.read_text()]
    return {run.name: (run / "result.json").stat().st_mtime for run in done}


def test_models_become_a_study(cluster, tiny: Path, tmp_path: Path, capsys) -> None:
    """A plugin model, one of RecBole's and one that has nothing to train; all is written."""
    folder, models = tmp_path / "study", ["FPARec", "GRU4Rec", "Pop"]
    given = {"epochs": 1, "MAX_ITEM_LIST_LENGTH": 8, "data_path": str(tiny)}
    options = {"dataset": "tiny", "config_dict": given, "seeds": 2}
    found = compare(models, folder, **options)
    assert list(found.runs["row"]) == [model for model in models for _ in range(2)]
    assert set(found.runs["status"]) == {"done"} and set(found.runs["seed"]) == {2020, 2021}
    assert list(found.pairs["row"]) == ["GRU4Rec", "Pop"]
    assert {"table.md", "table.csv", "runs.csv", "report.html"} <= {*os.listdir(folder)}

    before = times(folder)
    with lock_folder(folder, "compared"), pytest.raises(UsageError, match="is being compared by"):
        compare(models, folder, **options)
    assert compare(models, folder, **options).runs.equals(found.runs) and times(folder) == before
    assert recbole_pos.compare(folder, report=True, verbose=False).pairs.equals(found.pairs)

    compare(folder, folder, report=True, latex=True)
    assert (folder / "table.tex").read_text().count(r"\begin{tabular}") == 2
    assert (folder / "differences.pdf").read_bytes().startswith(b"%PDF")
    capsys.readouterr()
    assert main(["compare", str(folder), "--plan", "--difference", "0.01"]) == 0
    out = capsys.readouterr().out
    assert "Minimum detectable difference from FPARec" in out and "needed for 0.01" in out


def test_rows_made_from_others(cluster, tiny: Path, tmp_path: Path) -> None:
    """They are attached to trained weights or test them again, also after the data have moved."""
    old, new, run_dir = tmp_path / "old", tmp_path / "new", tmp_path / "s"
    shutil.copytree(tiny, old)
    rows: dict[str, Any] = {
        "RoPE": {"position": ["rope"], "search": {"hidden_dropout_prob": [0.1, 0.4]}},
        "Wild": {"position": ["nope"], "learning_rate": 1e12, "epochs": 5},
    }
    compare(study(old, rows=rows), run_dir)
    old.rename(new)
    masked = "RoPE, past left out"  # rows of one table rank the same items
    rows |= {
        "RoPE + kernel": {"attach": {"to": "RoPE", "schemes": ["kernel"]}},
        masked: {"retest": "RoPE", "mask_history": True},
        "Wild + kernel": {"attach": {"to": "Wild", "schemes": ["kernel"]}},
    }
    tables = [{"rows": [row for row in rows if row != masked]}, {"rows": [masked]}]
    before = times(run_dir)
    runs = compare(study(new, rows=rows, tables=tables), run_dir).runs.set_index(["row", "seed"])
    assert before and times(run_dir).items() >= before.items()  # nothing is trained again
    for row in rows:
        assert set(runs.loc[row, "status"]) == {"failed" if "Wild" in row else "done"}
    assert "loss is" in runs.loc[("Wild", 2020), "reason"]

    paths = runs["path"].xs(2021, level="seed")
    first, again, attached = (run_dir / paths[row] for row in ("RoPE", masked, "RoPE + kernel"))
    config = read_yaml(attached / "config.yaml")
    assert config["train_only"] == ["kernel"] and config["position"] == ["rope", "kernel"]
    assert config["init_from"].endswith(first.name) and config["seed"] == 2021
    made = recbole_pos.load(first, data_path=str(new))
    made.config["mask_history"] = True
    expected = made.trainer.evaluate(made.loaders["test"], load_best_model=False)
    line = runs.loc[(masked, 2021)]
    assert {name: line[name] for name in expected} == pytest.approx(dict(expected))
    assert (first / "metrics.jsonl").read_bytes() == (again / "metrics.jsonl").read_bytes()
    assert pd.isna(line["seconds"]), "nothing was trained"


def test_a_search_goes_by_validation_alone(cluster, tiny: Path, tmp_path: Path) -> None:
    """No trial has a test event, so none can read a test metric; the best one is tested."""
    kept = StudyFolder(tmp_path / "s")
    found = compare(study(tiny, search={"learning_rate": [1e-5, 3e-2]}, rows=NOPE), kept.path)
    fits = [kept.read_fit(path.name) for path in kept.runs.iterdir()]
    trials = [fit for fit in fits if fit["stage"] == "trial"]
    assert [(trial["test"], trial["test_targets"]) for trial in trials] == [(None, 0)] * 2
    assert not any(kept.run(trial["digest"]).ranks.exists() for trial in trials)
    best = max(trials, key=lambda trial: trial["best_valid"]["ndcg@10"])
    tested = [kept.read_fit(digest) for digest in found.runs["digest"]]
    assert {fit["searched"]["learning_rate"] for fit in tested} == {*best["searched"].values()}
    assert tested[0]["best_valid"] == best["best_valid"]  # not trained a second time


def test_a_class_of_the_user_is_a_row(cluster, tiny: Path, tmp_path: Path, monkeypatch) -> None:
    """Of a script, or of a folder that a script has put into sys.path; a failure has a reason."""

    class Typed(PosSASRec):
        """Nothing but a name."""

    Typed.__module__ = "__main__"
    fails = "    def encode(self, *_):\n        raise ValueError('no such thing')"
    code = "from recbole_pos.model.sasrec import PosSASRec\nclass Failing(PosSASRec):\n"
    (tmp_path / "my_models.py").write_text(code + fails)
    monkeypatch.syspath_prepend(str(tmp_path))
    models = [Typed, importlib.import_module("my_models").Failing]
    given = {**SMALL, "data_path": str(tiny), "run_dir": tmp_path / "s", "verbose": False}
    found = recbole_pos.compare(models, "tiny", **given)
    assert list(found.runs["status"]) == ["done", "failed"], found.runs["reason"].tolist()
    assert "no such thing" in found.tables[-1].markdown()


def test_runs_that_exist(trained, tmp_path: Path, refused) -> None:
    """Compared where data and split are the same; else an error that says what is not."""
    one, three = trained("FPARec"), trained("PosSASRec", seed=1)
    two = Path(shutil.copytree(trained("PosSASRec"), tmp_path / "two"))
    other = trained("FPARec", eval_args={"split": {"GT": [0.6, 0.8]}})
    command = ["compare", *map(str, (one, two, three))]
    assert main([*command, "--run_dir", str(tmp_path / "out")]) == 0
    runs = pd.read_csv(tmp_path / "out" / "runs.csv")
    assert list(runs["row"]) == ["FPARec", "PosSASRec", "PosSASRec"]
    result = json.loads((two / "result.json").read_text())
    result["versions"]["torch"] = "2.4.0"
    (two / "result.json").write_text(json.dumps(result))
    config = yaml.safe_load((two / "config.yaml").read_text())
    (two / "config.yaml").write_text(yaml.safe_dump({**config, "init_from": str(three)}))
    assert main([*command, "--run_dir", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "table.md").read_text()
    assert "different versions of torch: " in page and "2.4.0 (PosSASRec (init_from" in page
    names = list(pd.read_csv(tmp_path / "out" / "runs.csv")["row"])
    assert names[1:] == ["PosSASRec (init_from: a run)", "PosSASRec (init_from: None)"]
    refused(["compare", one, other], "test targets are not the same; were the data and the split?")
    refused(["compare", one], "two runs or more")
    (two / "test_ranks.parquet").unlink()
    refused(command, "run --resume")


def test_a_lost_process_resumes_its_run(cluster, tiny: Path, tmp_path: Path) -> None:
    """On Ray; test_local_runs.py kills processes of this machine, and the driver."""
    before, over = len(notes(cluster)), threading.Event()
    killed: list[int] = []

    def kill_a_worker() -> None:
        while not killed and not over.wait(0.01):
            killed.extend([n for n, what, _ in notes(cluster)[before:] if what == "epoch"][:1])
        for worker in killed:
            os.kill(worker, signal.SIGKILL)

    killer = threading.Thread(target=kill_a_worker)
    killer.start()
    base = {**BASE, "data_path": str(tiny), "epochs": 20, "stopping_step": 100}
    try:
        runs = compare(study(tiny, seeds=1, base=base), tmp_path / "s").runs
    finally:
        over.set()
        killer.join()
    assert killed and list(runs["status"]) == ["done"] * 2 and list(runs["epochs"]) == [20] * 2
    last = runs.iloc[-1]  # trained from shared data as from files
    files = [str(tmp_path / "s" / last["path"] / "config.yaml")]
    alone = recbole_pos.run(config_file_list=files, run_dir=tmp_path / "alone", verbose=False)
    assert alone.test == {name: last[name] for name in alone.test}


def test_rows_of_one_table_rank_the_same_items(cluster, tiny: Path, tmp_path: Path) -> None:
    """RecBole leaves seen items out for Pop only, which makes Pop look better than it is."""
    options = {"epochs": 1, "MAX_ITEM_LIST_LENGTH": 8, "data_path": str(tiny)}
    found = compare(["PosSASRec", "Pop"], tmp_path / "s", dataset="tiny", config_dict=options)
    assert set(found.runs["candidates"]) == {"all items"}
    protocol = "split LS: valid_and_test, 49 test targets (target: all), ranked among all items"
    assert protocol in repr(found)
    assert "15 of them items that their user has had before" in repr(found)
    masked = {"data_path": str(tiny), "mask_history": True}
    recbole_pos.run("Pop", "tiny", None, masked, run_dir=tmp_path / "masked", verbose=False)
    runs = [tmp_path / "s" / found.runs["path"][0], tmp_path / "masked"]
    with pytest.raises(UsageError, match="Pop ranks items not in the user's past"):
        recbole_pos.compare(runs, run_dir=tmp_path / "x", verbose=False)
    rows = {"all": {"position": ["nope"]}, "unseen": {"mask_history": True}}
    with pytest.raises(UsageError, match=r"^mask_history: all ranks all items and unseen ranks"):
        compare(study(tiny, rows=rows), tmp_path / "y")


FILES = {
    "own_package/scale.py": "FACTOR = 1.0\n",
    "own_package/unused.py": "FACTOR = 1.0\n",
    "own_late.py": "FACTOR = 1.0\n",
    "own_base.py": "from recbole_pos.model.sasrec import PosSASRec\n"
    "class Base(PosSASRec):\n"
    "    def encode(self, batch):\n"
    "        import own_late\n"
    "        return own_late.FACTOR * super().encode(batch)\n",
    "own_model.py": "import own_base, own_package.scale\nclass Helped(own_base.Base): ...\n",
}


def test_code_of_ones_own_counts(tiny: Path, tmp_path: Path, monkeypatch) -> None:
    """Of the model, in modules of its package or beside it, and of its bases, at any depth."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_package").mkdir()
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    model = importlib.import_module("own_model").Helped
    monkeypatch.setattr(MODELS, "added", {**MODELS.added})
    register_model(model)
    options = {"model": "Helped", "dataset": "tiny", "data_path": str(tiny)}
    config = make_row_config(options)
    names = {"": digest_run(config, {"data": "x"})}
    for file, text in FILES.items():
        (tmp_path / file).write_text(f"{text}#\n")
        names[file] = digest_run(config, {"data": "x"})
        (tmp_path / file).write_text(text)
    assert names.pop("own_package/unused.py") == names[""]
    assert len(set(names.values())) == len(names)


def test_the_same_bits_as_on_ray(tiny: Path, tmp_path: Path, monkeypatch, cluster) -> None:
    """Ranks of every test target."""
    from recbole_pos.study import dispatcher

    options: dict[str, Any] = {**SMALL, "data_path": str(tiny), "verbose": False}
    ranks = []
    for is_here in (True, False):
        monkeypatch.setattr(dispatcher, "can_run_here", lambda *_, is_here=is_here: is_here)
        options["run_dir"] = tmp_path / str(is_here)
        compared = recbole_pos.compare(["PosSASRec"], "tiny", **options)
        (run,) = (compared.folder / path for path in compared.runs["path"])
        ranks.append(pd.read_parquet(run / "test_ranks.parquet"))
        assert compared.runs["ndcg@10"].notna().all()
    pd.testing.assert_frame_equal(*ranks)
