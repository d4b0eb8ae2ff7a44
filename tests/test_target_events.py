"""target_events: which interactions are predicted, while histories have all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import make_log, small, write_atomic

from recbole_pos.data.dataset import PosDataset
from recbole_pos.data.splits import PHASES, TEST, TRAIN, VALID
from recbole_pos.experiment.build import Experiment, prepare

LOAD = {"inter": ["user_id", "item_id", "timestamp", "kind", "stars"]}
BUY = {"kind": ["buy", "gift"]}


def log_of_kinds() -> pd.DataFrame:
    frame, rng = make_log(seed=5), np.random.default_rng(0)
    frame["kind"] = rng.choice(["view", "buy", "gift", ""], len(frame), p=[0.5, 0.3, 0.1, 0.1])
    frame["stars"] = rng.choice(["1", "4.5", "5", ""], len(frame))
    return frame


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_atomic(log_of_kinds(), tmp_path_factory.mktemp("kinds"))
    file = folder / "tiny" / "tiny.inter"
    file.write_text(file.read_text().replace("kind:float", "kind:token", 1))
    return folder


def open_kinds(folder: Path, model: str = "PosSASRec", **options: Any) -> Experiment:
    given = {"target_events": BUY, "load_col": LOAD, "data_path": str(folder), **options}
    return prepare(small(model, **given))


def brute_force(split: dict[str, Any], bought: Any) -> list[tuple[str, float, str, str]]:
    """(user, time, item, part) of every target, by loops over users."""
    frame, found = log_of_kinds(), []
    edges = np.quantile(frame.timestamp, split.get("GT", [0, 1])).tolist()
    for user, group in frame.sort_values("timestamp", kind="stable").groupby("user_id"):
        targets = [row for row in list(group.itertuples())[1:] if bought(row)]
        n = len(targets)
        if "LS" in split:
            parts = [TRAIN] * n
            if n > 1:
                parts[-1] = TEST
            if n > 2:
                parts[-2] = VALID
        elif "RS" in split:
            valid = test = n // 4
            if n and 0 < n / 4 < 1 and n > 1:
                test, valid = 1, 1 if n > 2 else 0
            parts = [TRAIN] * (n - valid - test) + [VALID] * valid + [TEST] * test
        else:
            parts = [
                int(row.timestamp > edges[0]) + int(row.timestamp > edges[1]) for row in targets
            ]
        for row, part in zip(targets, parts, strict=True):
            found.append((user, row.timestamp, row.item_id, PHASES[part]))
    return sorted(found)


@pytest.mark.parametrize(
    ("split", "wanted"),
    [
        ({"LS": "valid_and_test"}, {"stars": [4.5, 5], "kind": "view"}),
        ({"RS": [2, 1, 1]}, BUY),
        ({"GT": [0.6, 0.8]}, BUY),
    ],
    ids=str,
)
def test_targets_are_those_of_the_kind(folder: Path, split: dict, wanted: dict) -> None:
    """In rows and in windows; histories are whole, and training ends before what is held out."""
    made = open_kinds(folder, eval_args={"split": split}, target_events=wanted)
    dataset, log = made.dataset, made.dataset.log
    user, item = (dataset.field2id_token[f] for f in ("user_id", "item_id"))

    def bought(row: Any) -> bool:
        return all(
            getattr(row, field) in (list(map(str, v)) if isinstance(v, list) else [v])
            for field, v in wanted.items()
        )

    found = []
    for phase in PHASES:
        at = np.flatnonzero(dataset._is_target(phase))
        columns = user[log.users[at]], log.times[at].tolist(), item[log.items[at]]
        found += [(*row, phase) for row in zip(*columns, strict=True)]
    assert sorted(found) == brute_force(split, bought)
    loader = made.loaders["train"]
    batches = [loader.gather(batch) for batch in loader._get_batches()]
    trained = set(np.flatnonzero(dataset._is_target("train")))
    assert sum(map(len, batches)) == len(trained) == loader.num_targets
    for windows, batch in zip(loader._get_batches(), batches, strict=True):
        places = [e for w in windows for e in range(loader.windows.start[w], loader.windows.end[w])]
        assert batch.items.tolist() == log.items[places].tolist()  # all kinds
        after = range(len(places)) if batch.positions is None else batch.positions
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
    assert isinstance(train, PosDataset)
    names = made.dataset.field2id_token["kind"]
    assert set(names[train.inter_feat["kind"]]) == {"buy", "gift"}
