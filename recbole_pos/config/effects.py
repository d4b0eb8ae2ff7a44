"""Under which conditions an option is read: a value that changes nothing is an error.

The table in ``options.py`` gives an option its conditions. Models of other packages may read any
option about the data, so conditions that name readers do not count for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recbole_pos.config.option import Condition
from recbole_pos.data.kinds import SIDE_FEATURES
from recbole_pos.data.location import atomic_file
from recbole_pos.errors import UsageError
from recbole_pos.model.models import ADDED, OURS, on_our_base
from recbole_pos.values import Options, listed, nearest, shown

if TYPE_CHECKING:
    from recbole_pos.data.protocols import Fields

_UNTRAINED = ("SPop", "SessionKNN")  # beside RecBole's traditional models
_LAST_ITEM = ("FPMC", "SessionFPMC", "SessionKNN")  # models that read nothing else of a history


def under(key: str, *values: Any, without: bool = False) -> Condition:
    """Read where another option has one of some values.

    Args:
        key: the other option, within a mapping by a dot. One that the model does not have is no
            reason.
        values: of it; any that is not empty, 0 or False when there are none.
        without: whether the option is read where the other one is empty instead.
    """

    def condition(config: Options, value: Any) -> str | None:
        found = inner(config, key)
        if found is _ABSENT or (found in values if values else bool(found) != without):
            return None
        wanted = " or ".join(_yaml(value) for value in values)
        need = f"under {key}: {wanted}" if values else f"{'without' if without else 'with'} {key}"
        return f"is only read {need}, not {_yaml(found)}"

    return condition


def either(*conditions: Condition) -> Condition:
    """Read where one of the conditions holds; the message is that of the last."""

    def condition(config: Options, value: Any) -> str | None:
        wrong = [one(config, value) for one in conditions]
        return None if None in wrong else wrong[-1]

    return condition


_ABSENT = object()


def inner(config: Options, key: str) -> Any:
    """The value of an option, of one within a mapping by a dot; ``_ABSENT`` where none exists."""
    name, _, part = key.partition(".")
    if name not in config:
        return _ABSENT
    return (config[name] or {}).get(part) if part else config[name]


def _yaml(value: Any) -> str:
    plain = {None: "empty", True: "true", False: "false"}
    return plain[value] if value is None or isinstance(value, bool) else str(value)


def sequential(config: Options, value: Any) -> str | None:
    """Read by models of histories."""
    if config["MODEL_TYPE"].name == "SEQUENTIAL" or config["model"] in ADDED:
        return None
    return f"is only read by models of histories, and {config['model']} knows users by their ids"


def histories(config: Options, value: Any) -> str | None:
    """Read by models of more than the last item."""
    if config["model"] in _LAST_ITEM:
        return f"is not read by {config['model']}, which knows the last item of a history only"
    return sequential(config, value)


def trained(config: Options, value: Any) -> str | None:
    """Read by models that learn by gradients."""
    if config["MODEL_TYPE"].name == "TRADITIONAL" or config["model"] in _UNTRAINED:
        return f"is only read in training by gradients, and {config['model']} counts"
    return None


def repeated(config: Options, value: Any) -> str | None:
    """As above; a model that counts does so in one epoch, with or without validation."""
    return None if value <= 1 else trained(config, value)


def unused_by(model: str) -> Condition:
    """Read by all models but one of RecBole's, whose code asks for it and does nothing with it."""
    wrong = f"is an option of RecBole's {model} that its computation does not use"
    return lambda config, value: wrong if config["model"] == model else None


def custom(instead: str = "") -> Condition:
    """Read by models of other packages only; ``instead`` is what has the effect looked for."""

    def condition(config: Options, value: Any) -> str | None:
        text = f"is not read by {config['model']}, nor by any model of RecBole's that runs here"
        text += f"; {instead}" if instead else ""
        return None if config["model"] in ADDED else text

    return condition


def preloaded(config: Options, value: Any) -> str | None:
    """Read by the plugin's models, whose items may have content vectors."""
    from recbole_pos.model.models import on_our_base  # not for --help, which imports nothing heavy

    instead = "give numbers as float fields of the item table, or take a model of the plugin"
    if not on_our_base(config["model"]):
        return custom(instead)(config, value)
    return None


def of_wandb(config: Options, value: Any) -> str | None:
    """Read where a run is reported to Weights & Biases."""
    given = config["logger"] if "logger" in config else None
    named = [given] if isinstance(given, str) else given or ()
    if "wandb" in named or config["log_wandb"]:
        return None
    return "is only read with logger: wandb"


def labelled(config: Options, value: Any) -> str | None:
    """As above, of what makes labels of a field; its own values decide."""
    kept = {field: f"[{least},inf)" for field, least in value.items()}
    what = "items are ranked, and no label is read; val_interval: "
    return custom(f"{what}{kept} keeps only what is rated so")(config, value)


def never(why: str) -> Condition:
    """Never read."""
    return lambda config, value: why


def decays(config: Options, value: Any) -> str | None:
    """Read where it says when the learning rate falls."""
    if value == "step" and not config["lr_decay_step"]:
        return "step is only read with lr_decay_step, the epochs between two steps"
    return None


def next_targets(config: Options, value: Any) -> str | None:
    """Read by the plugin's models, but for the one that has weights of its own for next items."""
    if config["model"] == "AttrFormer":
        return f"is not read by AttrFormer: future_weights has the next items, {[1.0] * value}"
    if on_our_base(config["model"]):
        return None
    return f"is read by the plugin's models only; {config['model']} predicts the next item"


def corrects_logits(config: Options, value: Any) -> str | None:
    """Read where negatives do not come from all items alike."""
    if value != "standard" or inner(config, "negative_sampler") != "uniform":
        return None
    return (
        "standard changes nothing under negative_sampler: uniform, where all logits are lowered by "
        "the same: it is none"
    )


def embedding(config: Options, value: Any) -> str | None:
    """Read by models of the plugin that put fields beside the vectors of items."""
    if not value or on_our_base(config["model"]):
        return None
    return (
        f"is not read by {config['model']}; the plugin's models with a table of items read it, and "
        "RecBole's SASRecF, GRU4RecF and FDSA selected_features"
    )


def accepted(option: str) -> Condition:
    """Read by all models but those whose class gives a reason in ``refuses``."""

    def condition(config: Options, value: Any) -> str | None:
        refuses = {"BERT4Rec": {"target_events": "it learns masked interactions of every kind"}}
        model = config["model"]
        of_class = getattr(OURS[model], "refuses", {}) if model in OURS else refuses.get(model, {})
        return (
            f"is not read by {model}: {of_class[option]}" if value and option in of_class else None
        )

    return condition


def several_targets(config: Options, value: Any) -> str | None:
    """Read where a user has more than one held-out event."""
    from recbole_pos.data.splits import read_split  # not for --help, which imports nothing heavy

    kind, _ = read_split(config["eval_args"])
    return "chooses among one event a phase under split: LS" if kind == "LS" else None


def files(parquet: bool) -> Condition:
    """Read of parquet files, or of text."""

    def condition(config: Options, value: Any) -> str | None:
        folder, name = Path(str(config["data_path"])) / config["dataset"], config["dataset"]
        found = [atomic_file(folder, name, table) for table in ("inter", "user", "item")]
        found = [file for file in found if file.is_file()]
        if not found or any((file.suffix == ".parquet") == parquet for file in found):
            return None
        kind, other = ("parquet", "text") if parquet else ("text", "parquet")
        return f"is only read of {kind} files, and those of {name} are {other}"

    return condition


def tables(config: Options, value: Any) -> str | None:
    """Read where attributes of users or items are loaded."""
    load_col = config["load_col"]
    if load_col is None or load_col.keys() & {"user", "item"}:
        return None
    return "is about the tables of users and items, of which load_col names none"


def of_tables(config: Options, value: Any) -> str | None:
    """Read of the tables that are loaded."""
    more = config["additional_feat_suffix"] or []
    known = ["inter", "user", "item", *([more] if isinstance(more, str) else more)]
    loaded = config["load_col"] or known
    for table in value:
        if table not in known:
            return f"names a table that is not read, {shown(table)}{nearest(table, known)}"
        if table not in loaded:
            return f"names {table}, of which load_col loads no field"
    return None


def fields_read(config: Options) -> set[str]:
    """Return fields that a model of the plugin's or RecBole's reads, beside ids and times."""
    names: set[str] = set()
    for key in ("selected_features", "difsr_fields", "relations", "new_items", *SIDE_FEATURES):
        given = config[key] if key in config else None
        for entry in [given] if isinstance(given, str) else given or ():
            both = (entry.get("field"), entry.get("within")) if isinstance(entry, dict) else [entry]
            names.update(name for name in both if isinstance(name, str))
    for pair in (config["preload_weight"] or {}).items():
        names.update(map(str, pair))
    return names - {config[f"{key}_FIELD"] for key in ("USER_ID", "ITEM_ID", "TIME")}


def of_fields(config: Options, value: Any) -> str | None:
    """Read where the model reads the fields that the option names."""
    read = fields_read(config)
    given = value if isinstance(value, (list, tuple, Mapping)) else [value]
    unread = [name for name in given if name not in read]
    if config["model"] in ADDED or not unread:
        return None
    what = f"reads {', '.join(sorted(read))}" if read else "reads ids and times alone"
    return f"names {shown(unread[0])}, which {config['model']} does not read: it {what}"


def of_numbers(config: Options, value: Any) -> str | None:
    """As above, of whatever fields are numbers; files decide the types of fields."""
    if not value or config["model"] in ADDED or fields_read(config):
        return None
    return f"changes numbers of attributes, and {config['model']} reads ids and times alone"


def embedded(config: Options, value: Any) -> str | None:
    """Read of fields that RecBole's models embed."""
    if config["model"] in ADDED:
        return None
    chosen = config["selected_features"] if "selected_features" in config else None
    if chosen is None:
        return (
            f"is only read with selected_features, which {config['model']} does not have"
            if value
            else None
        )
    unread = [name for name in value if name not in chosen]
    return f"names {shown(unread[0])}, which selected_features does not" if unread else None


def check_types(config: Options, default: Options, dataset: Fields) -> None:
    """Refuse options that change nothing for the types of the fields that a model reads.

    Args:
        config: configuration of the run.
        default: values that may be given where they are not read.
        dataset: after ``build``.

    Raises:
        UsageError: naming the option.
    """
    if config["model"] in ADDED:
        return
    from recbole_pos.data.attributes import find_table

    names = [name for name in fields_read(config) if name in dataset.field2type]
    types = {dataset.field2type[name].value for name in names}
    users = any(find_table(name, dataset) == "user" for name in names)
    needs = {
        "normalize_all": (any("float" in kind for kind in types), "numbers"),
        "pooling_mode": (any("seq" in kind for kind in types), "lists (token_seq)"),
        "numeric_embedding": ("float" in types, "numbers"),
        "user_layers": (users, "attributes of users"),
        "user_update": (users, "attributes of users"),
    }
    for key, (read, what) in needs.items():
        if not read and key in config and config[key] and config[key] != default[key]:
            raise UsageError(
                f"{key} is only read of {what}, and {config['model']} reads "
                f"{listed(names) or 'no field'}; leave it out"
            )
