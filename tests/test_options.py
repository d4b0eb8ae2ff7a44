"""The table of options: every number is bounded, and what options need of each other is said."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import shop
from absurd_options import NAMES
from recbole.config import Config
from recbole.data.interaction import Interaction

from recbole_pos.cli.main import main
from recbole_pos.cli.parser import parse_overrides
from recbole_pos.config.checks import _check_kind
from recbole_pos.config.option import IGNORED, Option
from recbole_pos.config.options import OPTIONS, cores, of_role, rule
from recbole_pos.config.posconfig import DERIVED_KEYS, PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import prepare
from recbole_pos.layers.attention import ACTIVATIONS
from recbole_pos.model.sasrec import BLOCKS
from recbole_pos.position.schemes import SCHEMES
from recbole_pos.values import nearest, suggest
from recbole_pos.yaml_files import ROOT, read_yaml

CHECKED = ("session_filter", "train_fraction")  # where they are read, see data/splits.py


def every_option() -> dict[str, list[Any]]:
    """Option -> examples of its values, of all models, schemes and losses; inner ones by a dot."""
    found: dict[str, list[Any]] = {}
    defaults = [PosConfig(name, "ml-100k").internal_config_dict for name in NAMES]
    defaults += [read_yaml(f) for f in (ROOT / "position").iterdir()]
    defaults += [read_yaml(f) for f in (ROOT / "loss").iterdir()]
    for options in defaults:
        for key in options.keys() - DERIVED_KEYS:
            if (example := rule(key).example) is None:
                example = options[key]
            if rule(key).inner is None:
                found.setdefault(key, []).append(example)
    for key, option in OPTIONS.items():
        inner = option.inner or {}
        found |= {f"{key}.{name}": [example] for name, example in inner.items()}
    return found


def leaves(example: Any) -> list[Any]:
    """What stands in lists and mappings."""
    if isinstance(example, dict):
        example = list(example.values())
    return sum(map(leaves, example), []) if isinstance(example, (list, tuple)) else [example]


def is_bounded(key: str, number: float) -> bool:
    if "dropout" in key:
        return True
    high = math.inf if rule(key).high is None else rule(key).high
    return high < math.inf or (isinstance(number, float) and rule(key).high is not None)


def test_every_number_has_bounds() -> None:
    """An option whose default is a number, and which the table leaves out, fails here."""
    options = every_option()
    assert options.keys() >= {"hidden_size", "nh", "dilations", "clip_grad_norm.max_norm"}
    numbers = {
        key: number
        for key, examples in options.items()
        for number in sum(map(leaves, examples), [])
        if isinstance(number, (int, float)) and not isinstance(number, bool)
    }
    own = ("threshold", *CHECKED)  # values of the data, of any size
    own += tuple(of_role(IGNORED))
    left = [key for key, n in numbers.items() if key not in own and not is_bounded(key, n)]
    assert left == [] and not is_bounded("new_size", 3)


def test_every_empty_option_says_what_it_takes() -> None:
    """Where the default is None nothing else tells a number from a text."""
    ignored = ("dataset_save_path", "dataloaders_save_path", "transform")
    untold = [
        key
        for key, examples in every_option().items()
        if all(e is None or e == [] for e in examples) and not key.startswith("eval_args.")
    ]
    assert set(untold) <= {*ignored, *CHECKED}


@pytest.mark.parametrize("workers", [1_000_000, 2 * cores() + 1])
def test_more_workers_than_cores_are_refused(workers: int, monkeypatch: Any) -> None:
    import multiprocessing

    monkeypatch.setattr(multiprocessing.Process, "start", lambda *_: pytest.fail("started"))
    with pytest.raises(UsageError, match=f"worker must be at most {2 * cores()} here, twice the"):
        PosConfig("FPARec", "ml-100k", None, {"worker": workers})
    assert PosConfig("FPARec", "ml-100k", None, {"worker": 2 * cores()})["worker"] == 2 * cores()


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("PosSASRec", {"position": ["difsr"], "difsr_size": 2**63}, "difsr_size.* 64 bits"),
        ("PosSASRec", {"position": ["difsr"], "difsr_size": 2**62}, "difsr_size must be at most"),
        (
            "PosSASRec",
            {"position": ["calendar_rope"], "calendar_parts": ["day", "weak"]},
            "'weak' is not one of hour, day, week.*did you mean week",
        ),
        ("PosSASRec", {"position": ["calendar_rope"], "calendar_parts": []}, "at least one"),
        ("SASRec", {"discretization": 1e-320}, "discretization: 1e-320 is too small"),
        ("SASRec", {"discretization": {"a": 3}}, "discretization.a: expected {method"),
        ("SASRec", {"discretization": {"a": {"method": "ED"}}}, "a.bucket: expected a whole"),
        ("SASRec", {"layer_norm_eps": 1e-320}, "layer_norm_eps: 1e-320 is too small"),
        ("SASRec", {"reg_weight": 3}, "unknown key"),
        ("Caser", {"reg_weight": 1e300}, "reg_weight must be at most 1e"),
        ("HGN", {"reg_weight": [0.0, "a"]}, r"reg_weight: expected a number .*found 'a'"),
        ("NARM", {"dropout_probs": [0.1, 1.5]}, r"dropout_probs must be in \[0, 1\)"),
        ("NARM", {"dropout_probs": [0.1]}, "dropout_probs: expected two numbers"),
        ("NextItNet", {"dilations": [1, 10**9]}, "dilations must be at most"),
        ("SASRec", {"hidden_size": 10, "n_heads": 4}, "10 is not a multiple of n_heads 4"),
        ("CORE", {"embedding_size": 10, "n_heads": 4}, "10 is not a multiple of n_heads 4"),
        ("FEARec", {"n_layers": 1}, "n_layers: FEARec needs at least 2, found 1"),
        ("FEARec", {"topk_factor": 1000}, "topk_factor: FEARec takes"),
        ("FOSSIL", {"order_len": 60}, "order_len: 60 is more than MAX_ITEM_LIST_LENGTH"),
        ("SINE", {"interest_size": 60}, "interest_size: 60 is more than prototype_size"),
        ("PosRec", {"messages": None}, "messages: None is not one of"),
        ("SASRec", {"wandb_project": None}, "wandb_project: expected text"),
        ("SASRec", {"gpu_id": {"a": 1}}, "gpu_id: expected numbers of GPUs"),
        ("SASRec", {"user_inter_num_interval": "text"}, "expected an interval such as"),
        ("SASRec", {"val_interval": {"rating": "[5,3]"}}, "val_interval.rating: expected an inter"),
        ("SASRec", {"seq_len": 3}, "seq_len: expected a mapping"),
        ("SASRec", {"seq_len": {"a": -3}}, "seq_len.a must be at least 1"),
        ("SASRec", {"alias_of_user_id": 3}, "alias_of_user_id: expected a list"),
        ("SASRec", {"clip_grad_norm": {"norm_type": 2}}, "needs max_norm"),
        ("SASRec", {"clip_grad_norm": {"max_norm": math.nan}}, "max_norm must be finite"),
        ("BPR", {"train_neg_sample_args": {"sample_num": 2**40}}, "sample_num must be at most"),
        ("BPR", {"topk": [10**9]}, "topk must be at most"),
        ("BPR", {"wandb_project": "a\0b"}, "zero byte"),
        ("BPR", {"threshold": {1: 2}}, "threshold: names must be text"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_what_is_absurd_is_named(model: str, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PosConfig(model, "ml-100k", None, options)


def test_lists_within_themselves_are_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UsageError, match="metrics: more than 8 lists"):
        PosConfig("FPARec", "ml-100k", None, {"metrics": endless})


def test_the_largest_gradient_is_a_norm() -> None:
    given = {"clip_grad_norm": {"max_norm": 1.0, "norm_type": math.inf}}
    assert PosConfig("FPARec", "ml-100k", None, given)["clip_grad_norm"] == given["clip_grad_norm"]


FEATURES = {
    "selected_features": ["brand", "tags", "price"],
    "load_col": shop.LOAD,
    "topk": [3],
    "valid_metric": "NDCG@3",
    "show_progress": False,
    "filter_inter_by_user_or_item": False,
    "epochs": 1,
}


@pytest.fixture(scope="module")
def shops(tmp_path_factory: Any) -> Path:
    return shop.write(tmp_path_factory.mktemp("shops"), shop.tables())


@pytest.mark.parametrize("augmentation", ["prefix", "all_positions"])
@pytest.mark.parametrize("model", ["SASRecF", "GRU4RecF", "FDSA"])
def test_features_that_are_numbers_must_be_numerical(
    shops: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, model: str, augmentation: str
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {**FEATURES, "data_path": str(shops), "augmentation": augmentation}
    arguments = [f"--{key}={value}" for key, value in given.items() if key != "load_col"]
    arguments.append(f"--load_col={shop.LOAD}")
    assert main(["run", "-m", model, "-d", "shop", *arguments]) == 2
    error = capsys.readouterr().err
    assert "selected_features: 'price' holds numbers" in error
    assert "add numerical_features: [price]" in error and list(tmp_path.iterdir()) == []
    made = prepare(PosConfig(model, "shop", None, {**given, "numerical_features": ["price"]}))
    made.trainer.fit(made.loaders["train"], None, saved=False, verbose=False)
    assert math.isfinite(made.trainer.progress.history[0]["loss"])
    rows = next(iter(made.loaders["test"]))[0]
    assert isinstance(rows, Interaction)
    assert made.model.full_sort_predict(rows).isfinite().all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([], "expected at least one field"),
        (["brnd"], "'brnd' is not loaded .*did you mean brand"),
        (["country"], "'country' is no attribute of items"),
        (["item_id"], "'item_id' is no attribute of items"),
    ],
)
def test_features_are_fields_of_items(shops: Path, fields: list[str], message: str) -> None:
    given = {**FEATURES, "data_path": str(shops), "selected_features": fields}
    with pytest.raises(UsageError, match=f"selected_features: .*{message}"):
        prepare(PosConfig("SASRecF", "shop", None, given))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[rope", "a list"),
        ("  [rope, [kernel]", "a list"),
        ("[a] b", "a list"),
        ("{", "a mapping"),
        ("{LS: [1, 2}", "a mapping"),
        ("{a: 1, a: 2}", "a mapping"),
        ("'rope", "a text in quotes"),
        ('"rope', "a text in quotes"),
        ("[" * 1500, "a list"),
    ],
)
def test_what_is_opened_and_not_closed_is_said(text: str, what: str) -> None:
    with pytest.raises(UsageError, match=f"--position: .* begins like {what}, but is none") as said:
        parse_overrides([f"--position={text}"])
    assert text[:20].strip()[:5] in str(said.value) and len(str(said.value)) < 500


@pytest.mark.parametrize("text", ["a: b: c", "x]", "@home", "*.csv", "C:\\data", "a [b", "`x`"])
def test_other_text_is_text(text: str) -> None:
    assert parse_overrides([f"--wandb_project={text}"]) == {"wandb_project": text}


@pytest.mark.parametrize("text", ["a: 2020-13-45", f"a: {'9' * 5000}", "a: " + "[" * 1500])
def test_files_that_python_cannot_read_are_no_yaml(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UsageError, match="a.yaml is not valid yaml"):
        read_yaml(tmp_path / "a.yaml")


def test_a_missing_wandb_says_what_to_install(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["run", "-m", "FPARec", "-d", "ml-100k", "--log_wandb=True"]) == 2
    assert "log_wandb: wandb is not installed: pip install" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "known", "wanted"),
    [
        ("LightGCN", NAMES, ""),
        ("MultiVAE", NAMES, ""),
        ("FPARek", NAMES, "FPARec"),
        ("sasrec", NAMES, "SASRec"),
        ("learing_rate", ["learning_rate", "epochs"], "learning_rate"),
        ("dropout", ["hidden_dropout_prob", "epochs"], "hidden_dropout_prob"),
    ],
)
def test_only_what_is_near_is_suggested(word: str, known: list[str], wanted: str) -> None:
    hint = suggest(word, known)
    assert hint.startswith(f" (did you mean {wanted}") if wanted else hint == ""
    assert not wanted or nearest(word, known).startswith(f"; nearest known: {wanted}")


def test_where_nothing_is_near_a_few_are_listed() -> None:
    assert nearest("zzz", ["max_norm", "norm_type"]) == "; known are max_norm, norm_type"
    assert nearest("zzz", [f"name_{n}" for n in range(100)]) == ""
    with pytest.raises(UsageError, match=r"unknown key 'zzz'\. FPARec on ml-100k does not read"):
        PosConfig("FPARec", "ml-100k", None, {"zzz": 1})


def test_every_option_of_the_plugin_has_a_row() -> None:
    """And no row stands for an option that nobody has."""
    files = [
        ROOT / "overall.yaml",
        ROOT / "base.yaml",
        *(f for d in ("model", "position", "loss") for f in (ROOT / d).iterdir()),
    ]
    ours = {key for file in files for key in read_yaml(file)}
    assert ours - OPTIONS.keys() == set()
    every = {key for name in NAMES for key in PosConfig(name, "ml-100k").internal_config_dict}
    inner = {f"{key}.{name}" for key, option in OPTIONS.items() for name in option.inner or {}}
    of_graphs = {"entity_kg_num_interval", "relation_kg_num_interval"}
    assert OPTIONS.keys() - every - ours - inner - {"model", "dataset", "plugins"} <= of_graphs


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_defaults_of_a_scheme_may_be_said(scheme: str) -> None:
    """As the config.yaml of a run says them, which is read when it is loaded."""
    said = read_yaml(ROOT / "position" / f"{scheme}.yaml")
    PosConfig("PosSASRec", "ml-100k", None, {"position": [scheme], **said})


def test_names_of_choices_are_those_of_the_code() -> None:
    assert rule("hidden_act").choices == tuple(ACTIVATIONS)
    assert rule("block").choices == tuple(BLOCKS)


def test_recboles_own_config_checks_options_of_the_plugin() -> None:
    """``run_recbole(model="FPARec")``: constructors trust what they are given."""
    for wrong, message in (
        ({"positional_mask": "never"}, "positional_mask: 'never' is not one of before_softmax"),
        ({"positional_rank": 0}, "positional_rank must be at least 1, found 0"),
        (
            {"eval_args": {"target": "some"}},
            "target: 'some' is not one of all, last, first, random",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            Config("FPARec", "ml-100k", config_dict=wrong)


@pytest.mark.parametrize("option", OPTIONS.values(), ids=lambda option: option.name)
def test_what_the_table_rules_out_is_refused(option: Option) -> None:
    """By its own row alone, whatever reads the option."""
    wrong = ["no such name"] if option.choices else []
    wrong += [v for v in (option.low, option.high) if v is not None and math.isfinite(v)]
    for value in wrong:
        if isinstance(value, (int, float)):
            value = value - 1 if value == option.low else value * 2 + 1
        with pytest.raises(UsageError, match=option.name.rpartition(".")[2]):
            _check_kind("here", option.name, option.name, value, value)
