"""Presets, and config files for several models: who takes what, and that every row can be run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.config.presets import FOR, parts_for, preset_or_file
from recbole_pos.errors import UsageError
from recbole_pos.yaml_files import ROOT, read_yaml

PRESETS = sorted(str(p.relative_to(ROOT / "presets")) for p in (ROOT / "presets").rglob("*.yaml"))
SESSIONS = "Pop SPop SessionKNN SessionBPR SessionFPMC GRU4Rec NARM STAMP SRGNN GCSAN SASRec FGNN"
# What each paper compares, as model and position; without a position, the model's own.
ROWS: dict[str, list[tuple[str, list[str] | None]]] = {
    "fparec": [
        *((model, None) for model in ("FPARec", "PARec", "SASRec")),
        *(("PosSASRec", ["learned", name]) for name in ("parec", "fparec", "average")),
        *(("PosSASRec", ["learned", name]) for name in ("linear_attention", "token_mixing")),
        *(("PosSASRec", ["learned", f"{name}_annealing"]) for name in ("linear", "exponential")),
        ("PosSASRec", ["learned"]),
    ],
    "sasrec": [(model, None) for model in ("PosSASRec", "FPARec", "TORoPE", "KernelAttention")],
    "kernel_attention": [
        *((model, None) for model in ("KernelAttention", "PosSASRec", "SASRec")),
        *(("PosSASRec", [name]) for name in ("nope", "learned", "rope", "cape", "kernel")),
        ("PosSASRec", ["rope", "kernel"]),
    ],
    "to_rope": [
        *((model, None) for model in ("TORoPE", "PosSASRec", "SASRec")),
        *((model, [n]) for model in ("TORoPE", "PosSASRec") for n in ("learned", "hstu", "rope")),
        *((model, [n]) for model in ("TORoPE", "PosSASRec") for n in ("time_rope", "to_rope")),
        *(("TORoPE", [name, "time_learned"]) for name in ("learned", "rope")),
    ],
    "posrec": [
        *((model, None) for model in ("PosRec", *SESSIONS.split())),
        *(("PosRec", [name]) for name in ("nope", "spe", "dpe", "ldpe")),
        *((f"Encoded{model}", [n]) for model in ("STAMP", "SASRec") for n in ("nope", "lpe")),
        *((f"Anchored{model}", None) for model in ("SRGNN", "GCSAN")),
    ],
    "attrformer": [
        *((model, None) for model in ("AttrFormer", "GRU4Rec", "SASRec", "BERT4Rec", "LightSANs")),
        *(("PosSASRec", [name]) for name in ("learned", "tisas", "difsr")),
        ("SASRecF", None),
    ],
}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_row_of_a_comparison_runs_with_its_preset(preset: str) -> None:
    """The shared settings are those of all rows, but for what a model has of its own."""
    content = read_yaml(ROOT / "presets" / preset)
    own = content.pop("model")
    shared = {key: value for key, value in content.items() if key not in (FOR, "eval_args")}
    rows = ROWS[Path(preset).parts[0]]
    assert own in [model for model, _ in rows]
    assert PosConfig(None, "ml-100k", [preset])["model"] == own
    for model, position in rows:
        given = {} if position is None else {"position": position}
        config = PosConfig(model, "ml-100k", [preset], given)
        assert config["model"] == model and config["metrics"] == content.get(
            "metrics", config["metrics"]
        )
        assert position is None or config["position"] == position
        _, *parts = parts_for(read_yaml(ROOT / "presets" / preset), {model}, preset)
        for key, value in {**shared, **dict(item for _, o in parts for item in o.items())}.items():
            if key not in given:
                assert config.plain[key] == value, (model, key)


def test_presets_are_found_by_name() -> None:
    config = PosConfig(None, "ml-100k", ["fparec/ml-1m.yaml"])
    assert config["model"] == "FPARec" and config["positional_rank"] == 40
    assert config["MAX_ITEM_LIST_LENGTH"] == 500
    assert PosConfig("PARec", "ml-100k", ["fparec/ml-1m.yaml"])["MAX_ITEM_LIST_LENGTH"] == 200
    assert preset_or_file("nothing.yaml") == Path("nothing.yaml")


@pytest.fixture
def opened(tmp_path: Path, monkeypatch) -> Any:
    """``opened(model, text, ..., **options)``: the configuration from files of these texts."""
    monkeypatch.chdir(tmp_path)

    def build(model: str | None, *texts: str, **options: Any) -> PosConfig:
        files = [f"{name}.yaml" for name in "abc"[: len(texts)]]
        for file, text in zip(files, texts, strict=True):
            Path(file).write_text(text)
        return PosConfig(model, "ml-100k", files, options)

    return build


def test_options_are_for_the_model_that_runs(opened) -> None:
    text = """
model: FPARec
epochs: 3
hidden_size: 32
for:
  FPARec, PARec: {hidden_size: 16, eval_args: {cold_items: drop}}
  FPARec:
  SASRec: {n_heads: 4}
  GRU4Rec: {dropout_prob: 0.1}
eval_args: {split: {LS: valid_only}}
"""
    for model, size in ((None, 16), ("PARec", 16), ("SASRec", 32), ("GRU4Rec", 32)):
        config = opened(model, text)
        assert (config["hidden_size"], config["epochs"]) == (size, 3)
        assert FOR not in config.plain
        assert config["eval_args"]["split"] == {"LS": "valid_only"}  # merged key by key
        assert (config["eval_args"]["cold_items"] == "drop") == (size == 16)
    assert opened("SASRec", text)["n_heads"] == 4
    assert opened("SASRec", text, n_heads=1)["n_heads"] == 1
    assert opened("GRU4Rec", text)["dropout_prob"] == 0.1


def test_later_files_win_over_parts_of_earlier_ones(opened) -> None:
    parts = "hidden_size: 8\nfor: {PARec: {hidden_size: 16}}\n"
    assert opened("PARec", parts, "hidden_size: 32\n")["hidden_size"] == 32
    assert opened("PARec", "hidden_size: 32\n", parts)["hidden_size"] == 16


def test_options_are_for_schemes_that_position_names(opened) -> None:
    """Wherever it is named: in a file, for the model, by its own yaml, on the command line."""
    text = "for: {rope: {rope_base: 7.0}, 'alibi, kerple': {kerple_kind: power}}\n"
    assert opened("PosSASRec", text, position=["rope"])["rope_base"] == 7
    assert opened("PosSASRec", text, position="kerple")["kerple_kind"] == "power"
    assert opened("PosSASRec", text, "position: [rope, kernel]\n")["rope_base"] == 7
    assert opened("PosSASRec", text, "for: {PosSASRec: {position: [rope]}}\n")["rope_base"] == 7
    assert "rope_base" not in opened("PosSASRec", text).plain
    assert "rope_base" not in opened("SASRec", text).plain
    assert opened("FPARec", "for: {fparec: {positional_rank: 3}}\n")["positional_rank"] == 3


def test_wrong_parts_are_named(opened) -> None:
    """Whichever model runs, a misspelt name is found."""
    for text, named in (
        ("for: {FPARek: {epochs: 1}}", "a.yaml, for FPARek: 'FPARek' is neither"),
        ("for: {'FPARec; PARec': {epochs: 1}}", "is neither"),
        ("for: {'FPARec,': {epochs: 1}}", "'' is neither"),
        ("for: [FPARec]", "a.yaml: for: "),
        ("for: {GRU4Rec: 3}", "for GRU4Rec: expected options, found 3"),
        ("for: {SASRec: {model: PARec}}", "for SASRec: model cannot"),
        ("for: {SASRec: {for: {}}}", "for SASRec: for cannot"),
        ("for: {rope: {position: [nope]}}", "for rope: position cannot"),
        ("for: {PosSASRec: {epochs: 1}, 'PosSASRec, SASRec': {epochs: 2}}", "for PosSASRec, SASR"),
        # keys that the model does not read, as anywhere else
        ("for: {PosSASRec: {positional_rank: 4}}", "a.yaml, for PosSASRec: unknown key"),
        ("for: {SASRec: {n_heads: 2}}\npositional_rank: 4", "a.yaml: unknown key"),
        ("for: {PosSASRec: {epochs: many}}", "a.yaml, for PosSASRec: epochs: "),
    ):
        with pytest.raises(UsageError) as refused:
            opened("PosSASRec", text + "\n")
        assert named in str(refused.value)
