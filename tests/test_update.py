"""A trained model goes on: with data that have grown, as an updated run, with more schemes."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import SMALL, make_log, train, write_atomic
from test_trainer import assert_same

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import CheckpointError, RunWarning, UsageError
from recbole_pos.experiment.build import prepare
from recbole_pos.experiment.run import load

LATER = 2e9  # seconds, after all of the log


def grow(log: pd.DataFrame, shuffle: bool) -> pd.DataFrame:
    """u5 and u6 come back, two users and an item are new."""
    users = ["u5", "u6", "u6", "someone", "someone", "no one"]
    items = ["i3", "a new item", "i4", "i7", "i3", "a new item"]
    times = LATER + np.array([0, 0, 1, 0, 2, 0])
    table = pd.DataFrame({"user_id": users, "item_id": items, "timestamp": times})
    if not shuffle:
        return pd.concat((log, table), ignore_index=True)
    table = pd.concat((table, log), ignore_index=True)
    return table.sort_values("item_id", kind="stable", ignore_index=True)


def by_user(found: pd.DataFrame) -> dict[str, pd.DataFrame]:
    return {user: table.reset_index(drop=True) for user, table in found.groupby("user_id")}


@pytest.mark.parametrize("model", ["FPARec", "SASRec", "Pop"])
def test_users_without_new_events_get_what_they_got(tmp_path, model) -> None:
    """Also if lines are in another order; of a tie that alone says which event was the later."""
    log = make_log().drop_duplicates(["user_id", "timestamp"])
    run_dir = train(write_atomic(log, tmp_path), tmp_path / "run", model)
    before = by_user(recbole_pos.recommend(run_dir, k=5))
    write_atomic(grow(log, shuffle=True), tmp_path)
    trained = recbole_pos.Recommender.load(run_dir)
    assert vars(trained.growth) == {"users": 2, "events": 4, "items": 1, "skipped": 2}
    after = by_user(recbole_pos.recommend(run_dir, k=5))
    assert set(after) == {*before, "someone", "no one"}
    assert set(after["no one"]["by"]) == {"popularity"}, "whose events the model does not know"
    for user in set(before) - {"u5", "u6"}:
        pd.testing.assert_frame_equal(before[user], after[user], rtol=1e-5)
    if model == "Pop":
        assert set(after["someone"]["by"]) == {"model"}
        return
    histories = [{"id": "someone", "items": ["i7", "i3"], "times": [LATER, LATER + 2]}]
    for user, item in (("u5", "i3"), ("u6", "i4")):
        own = log[log["user_id"] == user].sort_values("timestamp", kind="stable")
        times = [*own["timestamp"], LATER + 1 - (user == "u5")]
        histories.append({"id": user, "items": [*own["item_id"], item], "times": times})
    asked = by_user(trained.recommend(histories=histories, k=5).rename(columns={"id": "user_id"}))
    for user in ("someone", "u5", "u6"):
        assert after[user]["item_id"].tolist() == asked[user]["item"].tolist()
        np.testing.assert_allclose(after[user]["score"], asked[user]["score"], rtol=1e-4)


def test_filters_count_what_was_known(tmp_path, capsys) -> None:
    """i0 had too few events for the filter then; that it has enough now changes nothing."""
    log = make_log()
    rare = log["item_id"].value_counts().index[-1]
    least = int(log["item_id"].value_counts().iloc[-1]) + 1
    filters = {"item_inter_num_interval": f"[{least},inf)"}
    run_dir = train(write_atomic(log, tmp_path), tmp_path / "run", "FPARec", **filters)
    before = by_user(recbole_pos.recommend(run_dir, k=5))
    assert main(["recommend", str(run_dir), "--users", "u5"]) == 0
    assert "not in training (new, or left out by filters): items 1," in capsys.readouterr().out
    more = pd.DataFrame({"user_id": "u5", "item_id": [rare] * 5, "timestamp": LATER})
    write_atomic(pd.concat((log, more)), tmp_path)
    after = by_user(recbole_pos.recommend(run_dir, k=5))
    assert rare not in set(pd.concat(after.values())["item_id"])
    for user in before:
        pd.testing.assert_frame_equal(before[user], after[user], rtol=1e-5)


def test_what_was_known_must_be_there(tmp_path) -> None:
    log = make_log()
    run_dir = train(write_atomic(log, tmp_path), tmp_path / "run", "FPARec")
    grown = grow(log, shuffle=False)
    earlier = pd.DataFrame([("u9", "i1", 1.0)], columns=list(log))
    for changed in (grown.drop(index=3), pd.concat((grown, earlier))):
        write_atomic(changed, tmp_path)
        with pytest.raises(CheckpointError, match="have changed since"):
            recbole_pos.recommend(run_dir, k=5)


def test_attributes_may_change(tmp_path, capsys) -> None:
    """Another order of lines changes nothing; nor does a new kind; what has changed is reported."""
    log, file = make_log(), tmp_path / "tiny" / "tiny.item"
    kinds = {item: f"k{number % 3}" for number, item in enumerate(log["item_id"].unique())}

    def write_items(kinds: dict[str, str]) -> None:
        lines = [f"{item}\t{kind}" for item, kind in kinds.items()]
        file.write_text("\n".join(["item_id:token\tkind:token", *lines]) + "\n")

    write_atomic(log, tmp_path)
    write_items(kinds)
    columns = {"inter": ["user_id", "item_id", "timestamp"], "item": ["item_id", "kind"]}
    run_dir = train(tmp_path, tmp_path / "run", "AttrFormer", load_col=columns, relations=["kind"])
    one = by_user(recbole_pos.recommend(run_dir, k=5))
    write_atomic(grow(log, shuffle=False), tmp_path)
    write_items({"a new item": "k9", **dict(sorted(kinds.items(), reverse=True))})
    two = by_user(recbole_pos.recommend(run_dir, k=5))
    for user in set(one) - {"u5", "u6"}:
        pd.testing.assert_frame_equal(one[user], two[user], rtol=1e-5)
    write_items({**kinds, next(iter(kinds)): "k9"})
    assert main(["recommend", str(run_dir), "--users", "u5"]) == 0
    assert "values of kind have changed" in capsys.readouterr().out


def update(folder: Path, name: str = "new", **options: Any) -> Path:
    recbole_pos.update(folder / "old", options, folder / name, verbose=False)
    return folder / name


def vectors(run_dir: Path) -> dict[str, np.ndarray]:
    return dict(zip(*recbole_pos.Recommender.load(run_dir).item_vectors(), strict=True))


@pytest.mark.parametrize("model", ["PosSASRec", "AttrFormer"])
def test_starts_with_the_weights_of_each_name(tmp_path, model) -> None:
    """Nothing is learned at this rate, so every name still has its vector; lines are shuffled."""
    log = make_log()
    train(write_atomic(log, tmp_path), tmp_path / "old", model)
    before = recbole_pos.load(tmp_path / "old").model.state_dict()
    write_atomic(grow(log, shuffle=True), tmp_path)
    made = recbole_pos.load(update(tmp_path, epochs=1, learning_rate=1e-30, stopping_step=1))
    assert made.dataset.field2id_token["item_id"][-1] == "a new item"
    assert made.dataset.field2token_id["user_id"]["no one"]
    for name, weight in made.model.state_dict().items():
        known = weight[tuple(map(slice, before[name].shape))]
        torch.testing.assert_close(known, before[name], rtol=0, atol=1e-12)


def test_an_updated_run_is_a_run(tmp_path) -> None:
    """It resumes, recommends what is new, takes schemes and updates; its folder knows the ids."""
    log = make_log()
    train(write_atomic(log, tmp_path), tmp_path / "old", "PosSASRec")
    grown = grow(log, shuffle=False)
    write_atomic(grown, tmp_path)
    new = update(tmp_path, epochs=1)
    (tmp_path / "old").rename(tmp_path / "away")
    assert recbole_pos.run(resume=new, config_dict={"epochs": 2}, verbose=False).epochs == 2
    found = recbole_pos.recommend(new, k=len(log["item_id"].unique()))
    assert "a new item" in set(found["item_id"]) and "no one" in set(found["user_id"])
    tuned = {"config_dict": {"epochs": 1}, "run_dir": tmp_path / "tuned", "verbose": False}
    assert recbole_pos.attach(new, "kernel", **tuned).epochs == 1
    new.rename(tmp_path / "old")
    more = pd.DataFrame({"user_id": ["u5"], "item_id": ["another"], "timestamp": [3e9]})
    write_atomic(pd.concat((grown, more)), tmp_path)
    assert {"a new item", "another"} <= set(vectors(update(tmp_path, "third", epochs=1)))


def test_held_out_interactions_are_not_those_of_the_earlier_training(tmp_path) -> None:
    """Users who have lost their newest ones would be tested on those before; gone users are not."""
    log = make_log()
    train(write_atomic(log, tmp_path), tmp_path / "old")
    of_user = log["user_id"] == "u5"
    write_atomic(log.drop(index=log.index[of_user][-1]), tmp_path)
    with pytest.raises(UsageError, match="^update_from: user 'u5' has"):
        update(tmp_path, epochs=1)
    write_atomic(log[~of_user], tmp_path)
    update(tmp_path, "other", epochs=1)


def test_updates_that_do_not_fit_are_refused(tmp_path) -> None:
    train(write_atomic(make_log(), tmp_path), tmp_path / "old")
    old = tmp_path / "old"
    for options, message in (
        ({"hidden_size": 32}, "was trained with hidden_size: 16, this run has 32"),
        ({"init_from": "x"}, "weights come from one run"),
    ):
        given = {"update_from": str(old), **options}
        with pytest.raises(UsageError, match=message):
            recbole_pos.run(None, None, [str(old / "config.yaml")], given, tmp_path / "new")
    with pytest.raises(UsageError, match="^train_only: attach and update decide it"):
        recbole_pos.update(old, {"train_only": "kernel"}, tmp_path / "new")


# --- unfinished runs ---


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    train(write_atomic(make_log(), folder), folder / "old")
    write_atomic(grow(make_log(), shuffle=False), folder)
    return folder


@pytest.fixture
def here(shop, tmp_path, monkeypatch) -> Path:
    shutil.copytree(shop, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(epochs: int) -> list[str]:
    command = ["update", "old", "--run_dir", "new", "--data_path=.", "--quiet"]
    return [*command, f"--epochs={epochs}", "--stopping_step=1000"]


def test_an_update_is_resumed_like_any_run(here, refused) -> None:
    assert main(words(2)) == 0
    shutil.copytree("new", "whole")
    for name in ("result.json", "test_ranks.parquet"):
        (here / "new" / name).unlink()
    refused(words(2), "new holds a run already; continue it with `recbole-pos run --resume new`")
    assert main(["run", "--resume", "new", "--data_path=.", "--quiet"]) == 0
    assert_same(here / "whole", here / "new")


def test_an_unfinished_run_says_so_once_and_how_to_finish_it(here, capsys) -> None:
    """Killed while it was trained further; no update begins from it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RunWarning)
        recbole_pos.load("old", data_path=".")
    write_atomic(make_log(), here)
    assert main(["run", "--resume", "old", "--epochs=2", "--data_path=.", "--quiet"]) == 0
    Path("old/result.json").unlink()
    advice = "recbole-pos run --resume old"
    with pytest.warns(RunWarning, match=advice) as warned:
        assert main("recommend old --data_path . --users u9 -k 2".split()) == 0
    assert len(warned) == 1
    assert main(words(2)) == 2 and not Path("new").exists()
    assert advice in capsys.readouterr().err


# --- schemes that are attached, and trained alone (kernel paper, section 6.1) ---


MODEL = "PosSASRec"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load(folder).model.state_dict()


@pytest.fixture
def first(trained, tmp_path) -> Path:
    whole = trained(MODEL, n_heads=1, position=["learned", "rope"])
    return Path(shutil.copytree(whole, tmp_path / "first"))


def test_only_the_kernel_moves(first, tmp_path) -> None:
    options = {"weight_decay": 0.1, "learning_rate": 0.01}
    result = recbole_pos.attach(first, "kernel", options, tmp_path / "second", verbose=False)
    before, after = weights(first), weights(tmp_path / "second")
    added = {key: value for key, value in after.items() if ".kernel." in key}
    assert after.keys() - before.keys() == added.keys() and len(added) == 4  # U and L in two layers
    assert all(torch.equal(after[key], value) for key, value in before.items())
    length = load(first).config["MAX_ITEM_LIST_LENGTH"]
    rows = [value for key, value in added.items() if key.endswith("U.weight")]
    assert not any(torch.equal(row, torch.eye(length)[0]) for row in rows)
    assert result.parameters == 2 * length + length * (length + 1) // 2


def test_an_attached_kernel_starts_at_the_trained_model(tiny, tmp_path) -> None:
    first = train(tiny, tmp_path / "first", MODEL, n_heads=1, position=["cape"])
    options = {"position": ["cape", "kernel"], "init_from": str(first), "train_only": ["kernel"]}
    made = prepare(PosConfig(None, None, [str(first / "config.yaml")], options))
    rows = next(iter(made.loaders["test"]))[0]
    scores = [m.eval().full_sort_predict(rows) for m in (made.model, load(first).model)]
    assert torch.equal(*scores)


def test_a_run_starts_from_another_as_a_whole(tiny, first, tmp_path) -> None:
    options = {"n_heads": 1, "position": ["learned", "rope"], "init_from": str(first)}
    before, after = weights(first), weights(train(tiny, tmp_path / "second", MODEL, **options))
    key = "position_embedding.weight"
    assert not torch.equal(before[key], after[key])
    assert (before[key] - after[key]).abs().max() < 0.1  # moved on from there


def test_a_finished_fine_tuning_needs_its_source_no_more(first, tmp_path) -> None:
    recbole_pos.attach(first, ["kernel"], {"epochs": 1}, tmp_path / "second", verbose=False)
    first.rename(tmp_path / "gone")
    load(tmp_path / "second")
    resumed = recbole_pos.run(resume=tmp_path / "second", config_dict={"epochs": 2}, verbose=False)
    assert resumed.epochs == 2


def test_what_does_not_fit_is_not_attached(first, tmp_path) -> None:
    shuffled = write_atomic(make_log().iloc[::-1], tmp_path / "shuffled")  # other ids, same sizes
    cases = [
        ({"schemes": "rope"}, "given twice"),
        ({"schemes": "fparec"}, "replaces attention"),
        ({"schemes": "alibi"}, "has no parameters of"),
        ({"config_dict": {"hidden_size": 8}}, "was trained with hidden_size: 16"),
        ({"config_dict": {"block": "hstu"}}, "was trained with block: transformer"),
        ({"config_dict": {"train_only": ["rope"]}}, "attach and update decide it"),
        ({"config_dict": {"data_path": str(shuffled)}}, "other data or another split"),
    ]
    for change, message in cases:
        given = {"trained": first, "schemes": "kernel", "run_dir": tmp_path / "x", **change}
        with pytest.raises(UsageError, match=message):
            recbole_pos.attach(**given, verbose=False)
        assert not (tmp_path / "x").exists(), message


def test_weights_are_not_loaded_into_another_function(tiny, first) -> None:
    """Shapes alone would let these pass."""
    given = {**SMALL, "data_path": str(tiny), "init_from": str(first), "n_heads": 1}
    both = ["learned", "rope"]
    for model, change, message in [
        ("PosSASRec", {"position": ["learned", "kernel"]}, "has the scheme rope"),
        ("PosSASRec", {"position": both, "position_from": "oldest"}, "position_from"),
        ("KernelAttention", {"position": both, "embedding_scale": False}, "embedding_scale"),
    ]:
        with pytest.raises(UsageError, match=message):
            prepare(PosConfig(model, "tiny", None, {**given, **change}))


def test_another_choice_of_targets_is_no_other_data(tiny, tmp_path) -> None:
    gt = {"eval_args": {"split": {"GT": [0.7, 0.85]}}}
    first = train(tiny, tmp_path / "first", MODEL, n_heads=1, position=["rope"], **gt)
    options = {"epochs": 1, "eval_args": {"target": "last"}}
    result = recbole_pos.attach(first, "kernel", options, tmp_path / "x", verbose=False)
    assert result.split["target"] == "last" and "GT" in result.split["split"]
