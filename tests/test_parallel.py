"""Data-parallel training on CPUs: the same steps as one process, every event once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.distributed import Share
from recbole_pos.errors import Interrupted, UsageError
from recbole_pos.experiment import checkpoint, processes
from recbole_pos.experiment.build import prepare
from recbole_pos.experiment.processes import Plan
from recbole_pos.model.models import BUILTIN_GENERAL

# dropout is drawn in each process; without it a step is that of one process, up to rounding
TOYSHOP = Path(__file__).parent.parent / "dataset"
OPTIONS = {
    "hidden_size": 16,
    "inner_size": 16,
    "MAX_ITEM_LIST_LENGTH": 12,
    "epochs": 3,
    "train_batch_size": 16,
    "hidden_dropout_prob": 0.0,
    "attn_dropout_prob": 0.0,
    "learning_rate": 0.01,
}


def run(tiny: Path, folder: Path, nproc: int, model: str = "FPARec", **options):
    given = {**OPTIONS, "data_path": str(tiny), **options}
    if model not in recbole_pos.model.models.MODELS:
        given = {
            key: value for key, value in given.items() if "_size" not in key and "drop" not in key
        }
        given.update(options)
    if model in BUILTIN_GENERAL:
        given.pop("MAX_ITEM_LIST_LENGTH")
    return recbole_pos.run(model, "tiny", None, given, run_dir=folder, verbose=False, nproc=nproc)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("FPARec", {"train_windows": "sliding"}),  # packed windows, some events only context
        ("GRU4Rec", {"dropout_prob": 0.0, "train_batch_size": 8}),  # rows by RecBole's loader
    ],
)
def test_two_processes_take_the_steps_of_one(
    tiny: Path, tmp_path: Path, model: str, options: dict
) -> None:
    one = run(tiny, tmp_path / "one", 1, model, **options)
    two = run(tiny, tmp_path / "two", 2, model, **options)
    assert two.epochs == one.epochs == 3
    weights = [checkpoint.load(tmp_path / name / "checkpoint.pt")["weights"]["state_dict"]
               for name in ("one", "two")]  # fmt: skip
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-2, atol=2e-4)
    lines = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    for first, second in zip(*lines, strict=True):
        assert second["loss"] == pytest.approx(first["loss"], rel=1e-4)
        assert second["valid"]["ndcg@10"] == pytest.approx(first["valid"]["ndcg@10"], abs=0.02)
    assert two.test["ndcg@10"] == pytest.approx(one.test["ndcg@10"], abs=0.02)
    assert two.valid_targets == one.valid_targets and two.test_targets == one.test_targets


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("model", ["FPARec", "GRU4Rec", "BPR"])
def test_every_event_is_counted_once_per_epoch(experiment, model: str, size: int) -> None:
    """Over all processes, a batch that is smaller than their number included."""
    made = experiment(model, train_batch_size=16)
    whole = made.trainer.training_loader(made.loaders["train"])
    expected = whole.targets if model == "FPARec" else whole.sample_size
    seen, own = Counter(), 0
    for rank in range(size):
        part = experiment(model, train_batch_size=16)
        loader = part.trainer.training_loader(part.loaders["train"])
        share = Share(rank, size)
        if model == "FPARec":
            loader.share, gatherer = share, loader._gatherer
            gatherer = SimpleNamespace(
                device=gatherer.device,
                gather=lambda b, there, g=gatherer, s=share: (_count(seen, b, s), g.gather(b))[1],
            )
            loader._gatherer = gatherer
        else:
            collate = loader.collate_fn
            loader.collate_fn = lambda i, c=collate, s=share: (_count(seen, i, s), c(i))[1]
            loader.divide(share)
        for batch in loader:
            assert len(batch) >= 1
            own += share.own
    assert own == expected
    assert set(seen.values()) == {1}
    assert len(seen) == (len(whole.windows.lengths) if model == "FPARec" else expected)


def _count(seen: Counter, rows, share: Share) -> None:
    if share.own:  # a borrowed row has no weight
        seen.update(np.asarray(rows).tolist())


def test_every_target_is_ranked_once(experiment, monkeypatch) -> None:
    rows = []
    for rank in range(3):
        monkeypatch.setattr("recbole_pos.data.loaders.this_share", lambda r=rank: Share(r, 3))
        loader = experiment("FPARec", eval_batch_size=7).loaders["valid"]
        rows += [row for batch in loader for row in batch[0]["target_event"].tolist()]
    monkeypatch.undo()
    alone = experiment("FPARec").loaders["valid"]
    assert sorted(rows) == alone._dataset.inter_feat.target.tolist()


def test_a_small_batch_has_no_borrowed_weight() -> None:
    share = Share(2, 3)
    assert share.of(np.array([5, 9])).tolist() == [5] and share.weight == 0
    assert share.of(np.arange(7), np.full(7, 3)).tolist() == [2, 5] and share.weight == 6 / 21
    assert Share().of([1, 2, 3]) == [1, 2, 3]


def test_a_group_can_be_resumed_and_stopped(tiny: Path, tmp_path: Path) -> None:
    """From the same checkpoints, by one process or several."""
    run(tiny, tmp_path / "run", 2, epochs=2, hidden_dropout_prob=0.2)
    again = recbole_pos.run(
        resume=tmp_path / "run", config_dict={"epochs": 4}, nproc=2, verbose=False
    )
    assert again.epochs == 4
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [0, 1, 2, 3]
    alone = recbole_pos.run(resume=tmp_path / "run", config_dict={"epochs": 5}, verbose=False)
    assert alone.epochs == 5


@pytest.mark.long
def test_what_a_member_says_is_one_message(tiny: Path, tmp_path: Path, capsys) -> None:
    command = [
        "run",
        "-d",
        "tiny",
        f"--data_path={tiny}",
        "--nproc=2",
        f"--run_dir={tmp_path / 'x'}",
    ]
    assert main([*command, "-m", "Pop"]) == 2
    error = capsys.readouterr().err
    assert "Pop has no gradients" in error and "Traceback" not in error
    assert not (tmp_path / "x").exists()
    shop = [word if word != "tiny" else "toyshop" for word in command if "data_path" not in word]
    assert main([*shop, "-m", "AttrFormer", f"--data_path={TOYSHOP}"]) == 2
    assert "AttrFormer read each other" in capsys.readouterr().err
    nan = ["-m", "FPARec", "--learner=sgd", "--learning_rate=1e12", "--train_batch_size=8"]
    assert main([*command, *nan, "--hidden_size=16", "--inner_size=16"]) == 1
    error = capsys.readouterr().err
    assert "loss is" in error and "learning_rate" in error and "Traceback" not in error


def test_fewer_targets_than_processes(tiny: Path, monkeypatch) -> None:
    """A process without a row would leave the others waiting for its part of the metrics."""
    monkeypatch.setattr("recbole_pos.data.loaders.this_share", lambda: Share(0, 10**6))
    with pytest.raises(UsageError, match="nproc: 1000000 processes share the valid targets"):
        prepare(PosConfig("FPARec", "tiny", None, {"data_path": str(tiny)}))


def test_an_interrupt_before_the_first_checkpoint(tiny: Path, tmp_path: Path, monkeypatch) -> None:
    """There is nothing to resume yet, so nothing is said of it."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "launch", interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        run(tiny, tmp_path / "run", 2)
    assert not isinstance(caught.value, Interrupted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, -1, "localhost", None, 0), "--nproc"),
        ((1_000_000, -1, "localhost", None, 0), "--nproc: 1,000,000 processes on .* at most"),
        ((4, 2, "localhost", None, 0), "--world_size"),
        ((2, -1, "localhost", 99999999, 0), "--port: expected a number from 1 to 65535"),
        ((2, -1, "localhost", "", 0), "--port"),
        ((2, 4, "localhost", None, 3), "--group_offset"),
    ],
)
def test_a_plan_that_does_not_fit(arguments: tuple, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Plan.of(*arguments)


def test_gpus_of_processes(monkeypatch) -> None:
    assert processes.gpus_of("0", 2) == []  # none here
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert processes.gpus_of("2, 3,5", 2) == ["2", "3"] and processes.gpus_of("", 2) == []
    with pytest.raises(UsageError, match="gpu_id: names 1 GPUs for 2 processes"):
        processes.gpus_of("0", 2)
