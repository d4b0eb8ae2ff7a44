"""Validation on a sample of users: the same for all, and said; the test stays on all."""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import small

import recbole_pos
from recbole_pos.data.loaders import sample_users
from recbole_pos.experiment.build import prepare
from recbole_pos.experiment.run import describe_evaluation, evaluate


def validated(tiny: Path, model: str, **options) -> set[tuple[str, int]]:
    """The users that are validated, by name, with the number of the target in the log."""
    loader = prepare(small(model, data_path=str(tiny), **options)).loaders["valid"]
    names, found = loader._dataset.field2id_token["user_id"], set()
    for rows, *_ in loader:
        found |= set(zip(names[rows["user_id"]], rows["target_event"].tolist(), strict=True))
    return found


def test_the_sample_is_the_same_for_all_models_and_seeds(tiny) -> None:
    everybody = validated(tiny, "PosSASRec")
    sample = validated(tiny, "PosSASRec", valid_users=20)
    assert sample < everybody and len({user for user, _ in sample}) == 20
    assert validated(tiny, "BPR", valid_users=20, seed=7) == sample
    assert validated(tiny, "PosSASRec", valid_users=10**6) == everybody
    assert validated(tiny, "PosSASRec", valid_users=10) < sample


def test_a_sample_depends_on_names_only() -> None:
    names = np.array(["[PAD]", *(f"user {n}" for n in range(1000))])
    ids = np.arange(1, 1001)
    chosen = set(names[sample_users(np.repeat(ids, 2), names, 300)])
    reverse = np.append(names[:1], names[:0:-1])
    assert set(reverse[sample_users(ids, reverse, 300)]) == chosen and len(chosen) == 300
    first_half = {f"user {n}" for n in range(500)}
    assert len(chosen & first_half) == pytest.approx(150, abs=30)


def test_it_is_said_in_the_run_and_in_tables(tiny: Path, tmp_path: Path, cluster, capsys) -> None:
    options = {"data_path": str(tiny), "valid_users": 20, "epochs": 1}
    models = ["PosSASRec", "Pop"]
    compared = recbole_pos.compare(models, "tiny", None, options, run_dir=tmp_path / "study")
    printed = capsys.readouterr().out
    assert "Validation is on a sample of 20 users, the same for all." in printed
    run = compared.folder / compared.runs["path"].iloc[0]
    result = json.loads((run / "result.json").read_text())
    assert result["split"]["valid_users"] == 20
    assert result["test_targets"] == result["split"]["targets"]["test"]
    facts = describe_evaluation(run, "valid")
    assert facts["targets"] == result["valid_targets"] and "repeated_targets" not in facts
    assert evaluate(run, part="valid") == pytest.approx(result["best_valid"])
