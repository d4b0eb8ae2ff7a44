"""Under which conditions an option is read: a value that changes nothing is an error.

The table in ``options.py`` gives an option its conditions. A condition gets the configuration and
the option's value; it returns None where the option is read, and otherwise the predicate of a
message ("is only read with ..."). Models of other packages may read any option about the data, so
conditions that name readers do not count for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recbole_pos.config.option import Condition
from recbole_pos.data.location import SIDE_FEATURES, atomic_file
from recbole_pos.errors import UsageError
from recbole_pos.model.models import ADDED, OURS, on_our_base
from recbole_pos.values import Options, listed, nearest, shown

if TYPE_CHECKING:
    from recbole_pos.data.protocols import Dataset

_UNTRAINED = ("SPop", "SessionKNN")  # models that count, as RecBole's traditional ones do
_LAST_ITEM = ("FPMC", "SessionFPMC", "SessionKNN")  # models that read nothing else of a history


def if_option(key: str, *values: Any, without: bool = False) -> Condition:
    """Make the condition of an option that is read where another option has certain values.

    Args:
        key: name of the other option; within a mapping written with a dot. Where the model does
            not have it, the condition holds.
        values: values of the other option; if none are given, any but empty, 0 and False.
        without: whether the option is read where the other one is empty instead.
    """

    def condition(config: Options, value: Any) -> str | None:
        other = read_option(config, key)
        if other is _ABSENT or (other in values if values else bool(other) != without):
            return None
        wanted = " or ".join(_yaml(value) for value in values)
        need = f"under {key}: {wanted}" if values else f"{'without' if without else 'with'} {key}"
        return f"is only read {need}, not {_yaml(other)}"

    return condition


def if_any(*conditions: Condition) -> Condition:
    """Make a condition that holds where one of several does; its message is that of the last."""

    def condition(config: Options, value: Any) -> str | None:
        problems = [check(config, value) for check in conditions]
        return None if None in problems else problems[-1]

    return condition


_ABSENT = object()


def read_option(config: Options, key: str) -> Any:
    """Return the value of an option, or of ``mapping.key``; ``_ABSENT`` where none exists."""
    name, _, part = key.partition(".")
    if name not in config:
        return _ABSENT
    return (config[name] or {}).get(part) if part else config[name]


def _yaml(value: Any) -> str:
    """Return a value as yaml writes it, and None as "empty"."""
    words = {None: "empty", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def if_model_is_sequential(config: Options, value: Any) -> str | None:
    """Read by models that take a history of items."""
    if config["MODEL_TYPE"].name == "SEQUENTIAL" or config["model"] in ADDED:
        return None
    return f"is only read by models of histories, and {config['model']} knows users by their ids"


def if_model_reads_histories(config: Options, value: Any) -> str | None:
    """Read by models that take more of a history than its last item."""
    if config["model"] in _LAST_ITEM:
        return f"is not read by {config['model']}, which knows the last item of a history only"
    return if_model_is_sequential(config, value)


def if_model_is_trained(config: Options, value: Any) -> str | None:
    """Read by models that learn by gradients."""
    if config["MODEL_TYPE"].name == "TRADITIONAL" or config["model"] in _UNTRAINED:
        return f"is only read in training by gradients, and {config['model']} counts"
    return None


def if_epochs_repeat(config: Options, value: Any) -> str | None:
    """Read by trained models; others count in one epoch, for which any number up to 1 is fine."""
    return None if value <= 1 else if_model_is_trained(config, value)


def if_model_is_not(model: str) -> Condition:
    """Make the condition of an option that one of RecBole's models takes but never uses."""
    problem = f"is an option of RecBole's {model} that its computation does not use"
    return lambda config, value: problem if config["model"] == model else None


def if_model_is_custom(instead: str = "") -> Condition:
    """Make the condition of an option that only models of other packages read.

    Args:
        instead: advice that the message ends with: what has the intended effect here.
    """

    def condition(config: Options, value: Any) -> str | None:
        text = f"is not read by {config['model']}, nor by any model of RecBole's that runs here"
        text += f"; {instead}" if instead else ""
        return None if config["model"] in ADDED else text

    return condition


def if_model_takes_vectors(config: Options, value: Any) -> str | None:
    """Read by the plugin's models, whose items may have content vectors."""
    from recbole_pos.model.models import on_our_base  # late: --help imports nothing heavy

    instead = "give numbers as float fields of the item table, or take a model of the plugin"
    if not on_our_base(config["model"]):
        return if_model_is_custom(instead)(config, value)
    return None


def if_wandb_is_used(config: Options, value: Any) -> str | None:
    """Read where a run is reported to Weights & Biases."""
    logger = config["logger"] if "logger" in config else None
    loggers = [logger] if isinstance(logger, str) else logger or ()
    if "wandb" in loggers or config["log_wandb"]:
        return None
    return "is only read with logger: wandb"


def if_labels_are_read(config: Options, value: Any) -> str | None:
    """Read by custom models only, as here no label is made of a field; advise ``val_interval``."""
    kept = {field: f"[{least},inf)" for field, least in value.items()}
    what = "items are ranked, and no label is read; val_interval: "
    return if_model_is_custom(f"{what}{kept} keeps only what is rated so")(config, value)


def never(why: str) -> Condition:
    """Make the condition of an option that nothing reads, for the reason ``why``."""
    return lambda config, value: why


def if_rate_decays(config: Options, value: Any) -> str | None:
    """Read where ``lr_scheduler`` has what it needs to lower the learning rate."""
    if value == "step" and not config["lr_decay_step"]:
        return "step is only read with lr_decay_step, the epochs between two steps"
    return None


def if_model_takes_target_window(config: Options, value: Any) -> str | None:
    """Read by the plugin's models but AttrFormer, whose ``future_weights`` replace the option."""
    if config["model"] == "AttrFormer":
        return f"is not read by AttrFormer: future_weights has the next items, {[1.0] * value}"
    if on_our_base(config["model"]):
        return None
    return f"is read by the plugin's models only; {config['model']} predicts the next item"


def if_logits_are_corrected(config: Options, value: Any) -> str | None:
    """Return why a correction of logits has no effect; None if it has one.

    Uniform sampling lowers all logits by the same amount, which the softmax ignores.
    """
    if value != "standard" or read_option(config, "negative_sampler") != "uniform":
        return None
    return (
        "standard has no effect under negative_sampler: uniform, which lowers all logits by the "
        "same amount; use none"
    )


def if_model_takes_side_fields(config: Options, value: Any) -> str | None:
    """Read by models of the plugin that embed side fields beside the vectors of items."""
    if not value or on_our_base(config["model"]):
        return None
    return (
        f"is not read by {config['model']}; the plugin's models with a table of items read it, and "
        "RecBole's SASRecF, GRU4RecF and FDSA selected_features"
    )


def if_not_refused(option: str) -> Condition:
    """Make the condition of an option that a model's class may refuse (``refuses``: reasons)."""
    of_recbole = {"BERT4Rec": {"target_events": "it learns masked interactions of every kind"}}

    def condition(config: Options, value: Any) -> str | None:
        model = config["model"]
        ours = model in OURS
        reasons = getattr(OURS[model], "refuses", {}) if ours else of_recbole.get(model, {})
        return f"is not read by {model}: {reasons[option]}" if value and option in reasons else None

    return condition


def if_users_have_several_targets(config: Options, value: Any) -> str | None:
    """Read where a user has more than one held-out event."""
    from recbole_pos.data.splits import read_split  # late: --help imports nothing heavy

    kind, _ = read_split(config["eval_args"])
    return "chooses among one event a phase under split: LS" if kind == "LS" else None


def if_data_files_are(kind: str) -> Condition:
    """Make the condition of an option that is read of one kind of atomic files only.

    Args:
        kind: ``parquet`` or ``text``. Where no file of the dataset exists, the condition holds.
    """

    def condition(config: Options, value: Any) -> str | None:
        folder, name = Path(str(config["data_path"])) / config["dataset"], config["dataset"]
        files = [atomic_file(folder, name, table) for table in ("inter", "user", "item")]
        kinds = {"parquet" if f.suffix == ".parquet" else "text" for f in files if f.is_file()}
        if not kinds or kind in kinds:
            return None
        return f"is only read of {kind} files, and those of {name} are {kinds.pop()}"

    return condition


def if_tables_are_loaded(config: Options, value: Any) -> str | None:
    """Read where attributes of users or items are loaded."""
    load_col = config["load_col"]
    if load_col is None or load_col.keys() & {"user", "item"}:
        return None
    return "is about the tables of users and items, of which load_col names none"


def if_named_tables_are_loaded(config: Options, value: Any) -> str | None:
    """Read where all the tables that the option names are loaded."""
    added = config["additional_feat_suffix"] or []
    tables = ["inter", "user", "item", *([added] if isinstance(added, str) else added)]
    loaded = config["load_col"] or tables
    for table in value:
        if table not in tables:
            return f"names a table that is not read, {shown(table)}{nearest(table, tables)}"
        if table not in loaded:
            return f"names {table}, of which load_col loads no field"
    return None


def list_fields_read(config: Options) -> set[str]:
    """Return the fields that a model of the plugin or of RecBole reads, beside ids and times."""
    names: set[str] = set()
    for key in ("selected_features", "difsr_fields", "relations", "new_items", *SIDE_FEATURES):
        value = config[key] if key in config else None
        for entry in [value] if isinstance(value, str) else value or ():
            fields = [entry]
            if isinstance(entry, dict):  # a relation
                fields = [entry.get("field"), entry.get("within")]
            names.update(name for name in fields if isinstance(name, str))
    for pair in (config["preload_weight"] or {}).items():
        names.update(map(str, pair))
    return names - {config[f"{key}_FIELD"] for key in ("USER_ID", "ITEM_ID", "TIME")}


def if_fields_are_read(config: Options, value: Any) -> str | None:
    """Read where the model reads all the fields that the option names."""
    read = list_fields_read(config)
    fields = value if isinstance(value, (list, tuple, Mapping)) else [value]
    unread = [name for name in fields if name not in read]
    if config["model"] in ADDED or not unread:
        return None
    what = f"reads {', '.join(sorted(read))}" if read else "reads ids and times alone"
    return f"names {shown(unread[0])}, which {config['model']} does not read: it {what}"


def if_numbers_are_read(config: Options, value: Any) -> str | None:
    """Read where the model reads any field; which are numbers, files say (``check_types``)."""
    if not value or config["model"] in ADDED or list_fields_read(config):
        return None
    return f"changes numbers of attributes, and {config['model']} reads ids and times alone"


def if_fields_are_embedded(config: Options, value: Any) -> str | None:
    """Read where the option names only fields that a model of RecBole embeds."""
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


def check_types(config: Options, default: Options, dataset: Dataset) -> None:
    """Refuse options that change nothing for the types of the fields that a model reads.

    Args:
        config: configuration of the run.
        default: defaults, which may be given where they are not read.
        dataset: the dataset, after ``build``.

    Raises:
        UsageError: naming the option.
    """
    if config["model"] in ADDED:
        return
    from recbole_pos.data.attributes import loaded_fields

    names = [name for name in list_fields_read(config) if name in dataset.field2type]
    types = {dataset.field2type[name].value for name in names}
    tables = loaded_fields(dataset)
    users = any(tables.get(name) == "user" for name in names)
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
