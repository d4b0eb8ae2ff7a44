"""Event log, splits, windows and loaders against brute force on random logs."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import make_log, write_atomic
from hypothesis import given
from hypothesis import strategies as st
from recbole.data.dataset import SequentialDataset

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.dataset import PosDataset, PosSequentialDataset
from recbole_pos.data.events import EventLog
from recbole_pos.data.loaders import Needs, training_loader
from recbole_pos.data.splits import TEST, TRAIN, VALID, leave_one_out, ratio
from recbole_pos.errors import UsageError

ML100K = {"show_progress": False, "MAX_ITEM_LIST_LENGTH": 20}


def log_of(user: list[int], time: list[float]) -> EventLog:
    fields = {
        "u": torch.tensor(user),
        "i": torch.arange(len(user)),
        "t": torch.tensor(time, dtype=torch.float64),
    }
    return EventLog.build(fields, max(user, default=0) + 1, "u", "i", "t")


events = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=40)


@given(events)
def test_log_sorts_by_user_time_and_file_order(pairs: list[tuple[int, int]]) -> None:
    log = log_of([u for u, _ in pairs], [t for _, t in pairs])
    want = sorted(range(len(pairs)), key=lambda row: (pairs[row], row))
    assert log.items.tolist() == want
    for user in range(1, len(log.offsets) - 1):
        mine = [i for i in want if pairs[i][0] == user]
        assert log.items[log.offsets[user] : log.offsets[user + 1]].tolist() == mine


def test_log_refuses_float32_times() -> None:
    fields = {"u": torch.tensor([1]), "i": torch.tensor([1]), "t": torch.tensor([1.0])}
    with pytest.raises(TypeError, match="float64"):
        EventLog.build(fields, 2, "u", "i", "t")


def test_times_a_second_apart_keep_their_order(tmp_path: Path) -> None:
    """In float32, seconds since 1970 collide within 128 s, and these events would swap."""
    times = [1.5e9 + s for s in (3, 2, 1, 0)]
    assert len(set(np.float32(times))) == 1
    frame = pd.DataFrame({"user_id": ["a"] * 4, "item_id": list("wxyz"), "timestamp": times})
    config = PosConfig("SASRec", "tiny", None, {"data_path": str(write_atomic(frame, tmp_path))})
    dataset = PosSequentialDataset(config)
    test = dataset.build()[2]
    tokens = dataset.field2id_token["item_id"]
    assert tokens[test[np.array([0])]["item_id"].numpy()].tolist() == ["w"]
    assert dataset.log.times.tolist() == sorted(times)


def test_exact_times_change_ml_100k() -> None:
    """RecBole's float32 times give some users another last item; ours agree with pandas."""
    config = PosConfig("SASRec", "ml-100k", None, ML100K)
    dataset = PosSequentialDataset(config)
    frame = pd.read_csv(Path(config["data_path"]) / "ml-100k.inter", sep="\t")
    frame.columns = [c.split(":")[0] for c in frame]
    frame = frame.sort_values("timestamp", kind="stable")
    last = frame.groupby("user_id").item_id.last()
    test = dataset.build()[2][np.arange(943)]
    # RecBole's yaml for ml-100k normalises every float field; times are left alone
    assert dataset.log.times.min() == frame.timestamp.min() > 8e8
    users = dataset.field2id_token["user_id"][test["user_id"].numpy()]
    items = dataset.field2id_token["item_id"][test["item_id"].numpy()]
    assert {int(u): int(i) for u, i in zip(users, items, strict=True)} == last.to_dict()


@pytest.mark.parametrize("mode", ["valid_and_test", "valid_only", "test_only"])
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=8))
def test_leave_one_out_against_brute_force(mode: str, lengths: list[int]) -> None:
    want = []
    for n in lengths:
        labels = [TRAIN] * n
        phases = {"valid_and_test": [VALID, TEST], "valid_only": [VALID], "test_only": [TEST]}[mode]
        while len(phases) > max(n - 2, 0):  # one target stays for training
            phases = phases[1:]
        labels[n - len(phases) :] = phases
        want += labels
    per_event = np.repeat(lengths, lengths)
    ranks = np.concatenate([np.arange(n) for n in lengths])
    assert leave_one_out(per_event, ranks, mode).tolist() == want


@pytest.mark.parametrize("ratios", [[0.8, 0.1, 0.1], [0.5, 0.25, 0.25], [1, 0, 1]])
def test_ratio_split_equals_recboles(ratios: list[float]) -> None:
    share = [r / sum(ratios) for r in ratios]
    for n in range(2, 60):
        cuts = SequentialDataset._calcu_split_ids(None, n - 1, share)
        want = [TRAIN] + [int(np.searchsorted(cuts, row, "right")) for row in range(n - 1)]
        assert ratio(np.full(n, n), np.arange(n), ratios).tolist() == want


def brute_force_rows(frame: pd.DataFrame, longest: int) -> dict[str, list[tuple]]:
    """(user, history, target) of each phase, from the frame in file order."""
    rows: dict[str, list[tuple]] = defaultdict(list)
    for user, group in frame.sort_values("timestamp", kind="stable").groupby("user_id"):
        items = group.item_id.tolist()
        phases = ["test", "valid"][: max(len(items) - 2, 0)]
        for place in range(len(items) - 1, 0, -1):
            phase = phases.pop(0) if phases else "train"
            rows[phase].append((user, tuple(items[max(0, place - longest) : place]), items[place]))
    return {phase: sorted(found) for phase, found in rows.items()}


def lazy_rows(dataset, part) -> list[tuple]:
    users, items = (dataset.field2id_token[f] for f in ("user_id", "item_id"))
    batch = part[np.arange(len(part))]
    found = []
    for r in range(len(batch)):
        length = int(batch["item_length"][r])
        assert (batch["item_id_list"][r, length:] == 0).all()
        history = tuple(items[batch["item_id_list"][r, :length].numpy()])
        found.append((users[int(batch["user_id"][r])], history, items[int(batch["item_id"][r])]))
    return sorted(found)


def test_prefix_rows_against_brute_force(tiny: Path) -> None:
    dataset = PosSequentialDataset(
        PosConfig("SASRec", "tiny", None, {"data_path": str(tiny), "MAX_ITEM_LIST_LENGTH": 6})
    )
    want = brute_force_rows(make_log(), 6)
    for phase, part in zip(("train", "valid", "test"), dataset.build(), strict=True):
        assert lazy_rows(dataset, part) == want[phase]


def targets_of(model: str, tiny: Path, **options) -> dict[str, list[tuple[str, str]]]:
    """(user, item) a model is evaluated on, read from the loaders it is evaluated with."""
    config = PosConfig(model, "tiny", None, {"data_path": str(tiny), **options})
    from recbole_pos.experiment.build import prepare

    experiment = prepare(config)
    tokens = experiment.dataset.field2id_token
    found = {}
    for phase in ("valid", "test"):
        pairs = []
        for interaction, _, row, item in experiment.loaders[phase]:
            users = interaction["user_id"][row]
            pairs += zip(
                tokens["user_id"][users.numpy()], tokens["item_id"][item.numpy()], strict=True
            )
        found[phase] = sorted(pairs)
    return found


def test_all_models_see_the_same_targets(tiny: Path) -> None:
    """Plugin, RecBole sequential and RecBole general models, item by item."""
    rows = brute_force_rows(make_log(), 50)
    want = {
        phase: sorted((user, item) for user, _, item in rows[phase]) for phase in ("valid", "test")
    }
    for model in ("FPARec", "SASRec", "GRU4Rec", "Pop", "BPR"):
        assert targets_of(model, tiny) == want


def test_ratio_split_is_the_same_for_plugin_and_builtin(tiny: Path) -> None:
    options = {"eval_args": {"split": {"RS": [0.8, 0.1, 0.1]}}}
    found = targets_of("FPARec", tiny, **options)
    assert found == targets_of("SASRec", tiny, **options) and found["valid"]


def test_general_models_train_on_all_events_before_the_held_out(experiment) -> None:
    pop = experiment("Pop")
    held_out = sum(len(pop.loaders[p]._dataset) for p in ("valid", "test"))
    assert len(pop.loaders["train"]._dataset) == len(make_log()) - held_out


@pytest.mark.parametrize("negatives", [None, {"distribution": "uniform", "sample_num": 1}])
def test_pop_counts_training_events(experiment, negatives: dict | None) -> None:
    """All of a batch, where RecBole's own counts an item once; and no sampled negative."""
    made = experiment("Pop", train_batch_size=50, train_neg_sample_args=negatives, epochs=1)
    made.trainer.fit(made.loaders["train"], made.loaders["valid"])
    log, part = made.dataset.log, made.dataset.part
    counts = np.bincount(log.items.numpy()[part == TRAIN], minlength=made.dataset.item_num)
    assert counts.max() > 5
    np.testing.assert_array_equal(made.model.item_cnt[:, 0].numpy(), counts)


@pytest.mark.parametrize("model", ["FPMC", "BPR"])
def test_popular_negatives_come_from_training_alone(tmp_path: Path, model: str) -> None:
    """An item that only occurs held out must never be drawn as a popular negative."""
    frame = pd.DataFrame(
        {
            "user_id": [f"u{u}" for u in range(30) for _ in range(5)],
            "item_id": [i for u in range(30) for i in ("a", "bc"[u % 2], "d", "valid", "test")],
            "timestamp": list(range(5)) * 30,
        }
    )
    negatives = {"distribution": "popularity", "sample_num": 1}
    options = {"data_path": str(write_atomic(frame, tmp_path)), "train_neg_sample_args": negatives}
    config = PosConfig(model, "tiny", None, options)
    dataset = (PosSequentialDataset if model == "FPMC" else PosDataset)(config)
    train = training_loader(config, dataset.build()[0], Needs())
    drawn = torch.cat([batch["neg_item_id"] for _ in range(5) for batch in train])
    tokens = dataset.field2id_token["item_id"][drawn.unique()]
    assert set(tokens) <= {"a", "b", "c", "d"}


def test_lazy_rows_do_not_grow_with_the_window(tmp_path: Path) -> None:
    """Memory of a built-in's training rows is O(events): the same for L = 10 and L = 1000."""
    frame = make_log(users=40, longest=200)
    path = str(write_atomic(frame, tmp_path))

    def held(longest: int) -> int:
        options = {"data_path": path, "MAX_ITEM_LIST_LENGTH": longest}
        rows = (
            PosSequentialDataset(PosConfig("SASRec", "tiny", None, options)).build()[0].inter_feat
        )
        tensors = [rows.target, *rows.log.fields.values()]
        others = [v for v in vars(rows).values() if isinstance(v, torch.Tensor)]
        return sum(t.numel() for t in tensors + others)

    assert held(10) == held(1000) <= 8 * len(frame)


def test_a_builtin_can_index_history_fields(experiment) -> None:
    """FEARec reads dataset.inter_feat["item_id_list"][rows] in its constructor and loss."""
    rows = experiment("SASRec").loaders["train"]._dataset.inter_feat
    some = torch.tensor([5, 0, 7])
    assert torch.equal(rows["item_id_list"][some], rows[some]["item_id_list"])
    assert torch.equal(rows["item_length"][some], rows[some]["item_length"])
    with pytest.raises(KeyError, match="no field"):
        rows["nothing"]


def test_interaction_matrix_holds_the_training_events(experiment) -> None:
    made = experiment("SASRec")
    train = made.loaders["train"]._dataset
    matrix = train.inter_matrix("csr")
    assert matrix.sum() == (made.dataset.part == TRAIN).sum()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_args": {"order": "RO"}}, "order"),
        ({"eval_args": {"group_by": "none"}}, "group_by"),
        ({"eval_args": {"split": {"XX": 1}}}, "unknown split"),
        ({"eval_args": {"split": {"LS": "x"}}}, "valid_and_test"),
        ({"eval_args": {"split": {"RS": [1, 2]}}}, "three ratios"),
        ({"train_windows": "all"}, "train_windows"),
        ({"train_windows": "sliding", "window_stride": 0}, "window_stride"),
        ({"TIME_FIELD": "when"}, "when"),
        ({"window_stride": 3}, "only read under train_windows: sliding"),
        ({"ITEM_LIST_LENGTH_FIELD": "item_id"}, "exist already: item_id"),
        ({"LIST_SUFFIX": ""}, "LIST_SUFFIX: expected text"),
        ({"user_inter_num_interval": "[1000,inf)"}, "no interaction"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_data_options_say_what_is_wrong(experiment, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        made = experiment("PosSASRec", **options)
        made.trainer.training_loader(made.loaders["train"])


def test_missing_times_are_an_error(tmp_path: Path) -> None:
    frame = make_log(users=10)
    frame.loc[[3, 5], "timestamp"] = np.nan, np.inf
    options = {"data_path": str(write_atomic(frame, tmp_path))}
    with pytest.raises(UsageError, match="2 of .* no finite 'timestamp'"):
        PosSequentialDataset(PosConfig("FPARec", "tiny", None, options))


@pytest.mark.parametrize("keep", ["first", "last"])
def test_removing_duplicates_keeps_the_order_of_ties(tmp_path: Path, keep: str) -> None:
    """RecBole sorts by time with an unstable sort first, which shuffles equal times."""
    frame = pd.DataFrame(
        {
            "user_id": np.repeat([f"u{u}" for u in range(50)], 20),
            "item_id": [f"i{i}" for i in range(20)] * 50,
            "timestamp": np.tile(np.repeat([1.0, 2.0, 3.0, 4.0], 5), 50),
        }
    )
    path = str(write_atomic(frame, tmp_path))

    def order(**options) -> list[int]:
        config = PosConfig("SASRec", "tiny", None, {"data_path": path, **options})
        dataset = PosSequentialDataset(config)
        dataset.build()
        return dataset.field2id_token["item_id"][dataset.log.items.numpy()].tolist()

    assert order(rm_dup_inter=keep) == order() == frame.item_id.tolist()
    twice = pd.concat([frame, frame.assign(timestamp=9.0)])
    path = str(write_atomic(twice, tmp_path))
    assert order(rm_dup_inter=keep) == frame.item_id.tolist()


def test_a_quotation_mark_that_swallows_lines(tmp_path: Path, experiment) -> None:
    path = write_atomic(make_log(users=10), tmp_path)
    file = path / "tiny" / "tiny.inter"
    lines = file.read_text().splitlines()
    for row, cell in ((5, '"x'), (9, 'y"')):
        lines[row] = "\t".join([cell, *lines[row].split("\t")[1:]])
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(UsageError, match="quotation mark|quotes must be closed"):
        experiment("FPARec", data_path=str(path))


def test_more_cutoffs_than_items_is_an_error(tmp_path: Path, experiment) -> None:
    path = str(write_atomic(make_log(users=10, items=8), tmp_path))
    with pytest.raises(UsageError, match="topk: 20 is more than the 8 items"):
        experiment("FPARec", data_path=path)


def test_a_model_without_its_attribute_says_so(experiment) -> None:
    with pytest.raises(UsageError, match="selected_features: field 'class' is not loaded"):
        experiment("SASRecF")


def test_a_file_with_none_of_the_columns(tmp_path: Path, experiment) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "tiny.inter").write_text("who:token\twhat:token\na\tb\n")
    with pytest.raises(UsageError, match="field 'user_id'.*who:token, what:token"):
        experiment("FPARec", data_path=str(tmp_path))
