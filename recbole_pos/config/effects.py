"""Under which conditions an option is read: a value that changes nothing is an error.

The table in ``options.py`` gives an option its conditions. A condition gets the configuration and
the option's value; it returns None where the option is read, and otherwise the predicate of a
message ("is only read with ..."). Models of other packages may read any option about the data, so
conditions that name readers do not count for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from recbole_pos.config.option import Condition
from recbole_pos.data.location import SIDE_FEATURES
from recbole_pos.errors import UsageError
from recbole_pos.model.models import ADDED, OURS, is_on_our_base
from recbole_pos.position.schemes import SCHEMES, scheme_names
from recbole_pos.values import Options, listed, nearest, shown

if TYPE_CHECKING:
    from recbole_pos.data.protocols import Dataset

_NEIGHBOURS = ("SessionKNN", "TransitionGraph")
UNTRAINED = ("SPop", "Pop", "ItemKNN", *_NEIGHBOURS)  # models that count
_LAST_ITEM = ("FPMC", "SessionFPMC", *_NEIGHBOURS)  # they read nothing else of a history
_ABSENT = object()


# --- how conditions are made ---


def when(is_read: Callable[[Options, Any], Any], problem: str) -> Condition:
    """Make a condition of a test of configuration and value, and of a message where it fails.

    ``{model}`` in the message stands for the name of the model.
    """

    def condition(config: Options, value: Any) -> str | None:
        return None if is_read(config, value) else problem.format(model=config["model"])

    return condition


def if_option(text: str) -> Condition:
    """Make the condition of an option that is read where another option has certain values.

    The condition also holds where the model does not have the other option.

    Args:
        text: the other option (``mapping.key`` for one within a mapping), in one of three forms:
            ``fusion: early effective`` for one of these values, in a list for any of its elements;
            ``time_base`` for a value other than empty, 0 and False;
            ``not time_base`` for empty, 0 or False.
    """
    is_negated = text.startswith("not ")
    key, _, choices = text.removeprefix("not ").partition(": ")
    allowed = choices.split()

    def condition(config: Options, value: Any) -> str | None:
        other_value = _read_option(config, key)
        if other_value is _ABSENT:
            return None
        if allowed:
            elements = other_value if isinstance(other_value, list) else [other_value]
            is_met = any(element in allowed for element in elements)
            need = f"under {key}: {' or '.join(allowed)}"
        else:
            is_met = bool(other_value) != is_negated
            need = f"without {key}" if is_negated else f"with {key}"
        found = "not" if allowed else "which is"
        return None if is_met else f"is only read {need}, {found} {_format_yaml(other_value)}"

    return condition


def if_any(*conditions: Condition | str) -> Condition:
    """Make a condition that holds where one of several does.

    Its message names them all if they are texts; else it is that of the last one.
    """
    alternatives = make_conditions(conditions)
    names = [entry for entry in conditions if isinstance(entry, str)]

    def condition(config: Options, value: Any) -> str | None:
        problems = [alternative(config, value) for alternative in alternatives]
        if None in problems:
            return None
        has_names = len(names) == len(conditions)
        return f"is only read with {' or '.join(names)}" if has_names else problems[-1]

    return condition


def make_conditions(only: Condition | str | tuple[Condition | str, ...]) -> tuple[Condition, ...]:
    """Return one or several conditions as functions; a text becomes an :func:`if_option`."""
    conditions = only if isinstance(only, tuple) else (only,)
    return tuple(if_option(entry) if isinstance(entry, str) else entry for entry in conditions)


def _read_option(config: Options, key: str) -> Any:
    """Return the value of an option or of ``mapping.key``.

    It is ``_ABSENT`` if there is no such option, and None for a key that the mapping lacks.
    """
    name, _, inner_key = key.partition(".")
    if name not in config:
        return _ABSENT
    if not inner_key:
        return config[name]
    return (config[name] or {}).get(inner_key)


def _format_yaml(value: Any) -> str:
    """Return a value as yaml writes it, and None as "empty"."""
    text = "empty" if value is None else str(value)
    return text.lower() if isinstance(value, bool) else text


# --- which model reads it ---


def if_model_is_custom(instead: str = "") -> Condition:
    """Make the condition of an option that only models of other packages read.

    The message ends with what has the intended effect here, ``instead``.
    """
    text = "is not read by {model}, nor by any model of RecBole's that runs here"
    return when(_is_custom, f"{text}; {instead}" if instead else text)


def if_seen_are_excluded(config: Options, value: Any) -> str | None:
    """Hold where seen items are not ranked."""
    from recbole_pos.data.windows import masks_history  # with torch, which --help does not need

    return None if masks_history(config) else "is only read where mask_history excludes seen items"


def if_model_is_not(model: str) -> Condition:
    """Make the condition of an option that one of RecBole's models takes but never uses."""
    problem = f"is an option of RecBole's {model} that its computation does not use"
    return when(lambda config, value: config["model"] != model, problem)


def if_not_refused(option: str) -> Condition:
    """Make the condition of an option that the class of a model may refuse.

    Its attribute ``refuses`` maps such options to reasons, with which the message ends.
    """
    recbole_refuses = {"BERT4Rec": {"target_events": "it learns masked interactions of every kind"}}

    def condition(config: Options, value: Any) -> str | None:
        model = config["model"]
        reasons = recbole_refuses.get(model, {})
        if model in OURS:
            reasons = getattr(OURS[model], "refuses", {})
        if not value or option not in reasons:
            return None
        return f"is not read by {model}: {reasons[option]}"

    return condition


def _is_custom(config: Options, value: Any) -> bool:
    return config["model"] in ADDED


def _is_ours(config: Options, value: Any) -> bool:
    return is_on_our_base(config["model"])


if_model_is_sequential = when(
    lambda config, value: config["MODEL_TYPE"].name == "SEQUENTIAL" or _is_custom(config, value),
    "is only read by models of histories, and {model} knows users by their ids",
)
if_model_reads_histories = when(
    lambda config, value: config["model"] not in _LAST_ITEM,
    "is not read by {model}, which knows the last item of a history only",
)
if_model_is_trained = when(
    lambda config, value: (
        config["MODEL_TYPE"].name != "TRADITIONAL" and config["model"] not in UNTRAINED
    ),
    "is only read in training by gradients, and {model} counts",
)
if_epochs_repeat = if_any(when(lambda config, value: value <= 1, ""), if_model_is_trained)
OF_TRAINING = {if_model_is_trained, if_epochs_repeat}
if_model_takes_vectors = if_any(
    when(_is_ours, ""),
    if_model_is_custom(
        "give numbers as float fields of the item table, or take a model of the plugin"
    ),
)
if_model_takes_target_window = when(
    lambda config, value: _is_ours(config, value) and config["model"] != "AttrFormer",
    "is not read by {model}: RecBole's models predict the next item, and AttrFormer's "
    "future_weights are of the next items",
)
if_model_takes_side_fields = when(
    lambda config, value: not value or _is_ours(config, value),
    "is not read by {model}; the plugin's models with a table of items read it, and RecBole's "
    "SASRecF, GRU4RecF and FDSA selected_features",
)

# --- what else it takes ---


def _has_several_targets(config: Options, value: Any) -> bool:
    from recbole_pos.data.splits import read_split  # late: --help imports nothing heavy

    return bool(config["benchmark_filename"]) or read_split(config["eval_args"])[0] != "LS"


if_rate_decays = when(
    lambda config, value: value != "step" or config["lr_decay_step"],
    "step has no effect without lr_decay_step, the epochs between two steps",
)
if_logits_are_corrected = when(
    lambda config, value: (
        value != "standard" or _read_option(config, "negative_sampler") != "uniform"
    ),
    "standard has no effect under negative_sampler: uniform, which lowers all logits by the same "
    "amount; use none",
)
if_users_have_several_targets = when(
    _has_several_targets, "chooses among one interaction a phase under split: LS"
)
if_sessions_are_split = when(
    lambda config, value: not config["benchmark_filename"],
    "is not read with benchmark_filename, whose first file decides which sessions are trained on",
)
if_tables_are_loaded = when(
    lambda config, value: (
        config["load_col"] is None or config["load_col"].keys() & {"user", "item"}
    ),
    "is about the tables of users and items, of which load_col names none",
)


def if_named_tables_are_loaded(config: Options, value: Any) -> str | None:
    """Return why the option is of no use if it names a table that is not loaded."""
    tables = ["inter", "user", "item"]
    loaded = config["load_col"] or tables
    for table in value:
        if table not in tables:
            return f"names a table that is not read, {shown(table)}{nearest(table, tables)}"
        if table not in loaded:
            return f"names {table}, of which load_col loads no field"
    return None


# --- which fields a model reads ---


def _list_fields_read(config: Options) -> set[str]:
    """Return the fields that a model of the plugin or of RecBole reads, without ids and times."""
    names: set[str] = set()
    for key in ("selected_features", "difsr_fields", "relations", "new_items", *SIDE_FEATURES):
        value = config[key] if key in config else None
        entries = [value] if isinstance(value, str) else value or ()
        for entry in entries:
            fields = [entry]
            if isinstance(entry, dict):  # a relation
                fields = [entry.get("field"), entry.get("within")]
            names.update(field for field in fields if isinstance(field, str))
    return names - {config["USER_ID_FIELD"], config["ITEM_ID_FIELD"], config["TIME_FIELD"]}


def if_histories_are_not_cut(config: Options, value: Any) -> str | None:
    """Return why the option is of no use if it names the column of histories cut elsewhere."""
    histories = f"{config['ITEM_ID_FIELD']}{config['LIST_SUFFIX']}"
    if histories not in value:
        return None
    return (
        f"names {shown(histories)}, and examples that were cut elsewhere are not read: give the "
        "files an interaction a row (user, item and time), and the split by eval_args, or a file "
        "of interactions for each part by benchmark_filename"
    )


def if_fields_are_read(config: Options, value: Any) -> str | None:
    """Return why the option is of no use if it names a field that the model does not read."""
    if config["model"] in ADDED:
        return None
    fields_read = _list_fields_read(config)
    fields = value if isinstance(value, (list, tuple, Mapping)) else [value]
    unread = [name for name in fields if name not in fields_read]
    if not unread:
        return None
    instead = ", ".join(sorted(fields_read)) or "ids and times alone"
    return f"names {shown(unread[0])}, which {config['model']} does not read: it reads {instead}"


if_numbers_are_read = when(  # which fields are numbers, files say: see check_types
    lambda config, value: not value or _is_custom(config, value) or _list_fields_read(config),
    "changes numbers of attributes, and {model} reads ids and times alone",
)


def if_fields_are_embedded(config: Options, value: Any) -> str | None:
    """Return why the option is of no use if it names a field that ``selected_features`` lacks."""
    embedded = config["selected_features"] if "selected_features" in config else None
    if config["model"] in ADDED or not value:
        return None
    if embedded is None:
        return f"is only read with selected_features, which {config['model']} does not have"
    unread = [name for name in value if name not in embedded]
    return f"names {shown(unread[0])}, which selected_features does not" if unread else None


def if_request_is_read(config: Options, value: Any) -> str | None:
    """Return why the time of the request is of no use: neither model nor schemes read it."""
    model = config["model"]
    if model in ADDED or value != "target":
        return None
    text = ""
    position = _read_option(config, "position")
    if is_on_our_base(model) and model != "AttrFormer" and position is not _ABSENT:
        schemes = [SCHEMES[name] for name in scheme_names(position)]
        if any(getattr(scheme, "reads_request", False) for scheme in schemes):
            return None
        text = f" with position {shown(position)}"
    return (
        "is for PosSASRec, TORoPE and the like with a time-aware scheme in position, such as "
        f"time_rope (`recbole-pos schemes` lists them); {model}{text} reads no time of a "
        "request"
    )


def check_types(config: Options, defaults: Options, dataset: Dataset) -> None:
    """Raise a UsageError about an option without effect on fields of the types that a model reads.

    Defaults may be given all the same; the dataset is one after ``build``.
    """
    if config["model"] in ADDED:
        return
    from recbole_pos.data.attributes import map_fields_to_tables

    names = [name for name in _list_fields_read(config) if name in dataset.field2type]
    types = {dataset.field2type[name].value for name in names}
    tables = map_fields_to_tables(dataset)
    reads_users = any(tables.get(name) == "user" for name in names)
    for key, is_read, needed_type in (
        ("normalize_all", any("float" in kind for kind in types), "numbers"),
        ("pooling_mode", any("seq" in kind for kind in types), "lists (token_seq)"),
        ("numeric_embedding", "float" in types, "numbers"),
        ("user_layers", reads_users, "attributes of users"),
        ("user_update", reads_users, "attributes of users"),
    ):
        value = config[key] if key in config else None
        if value and value != defaults[key] and not is_read:
            raise UsageError(
                f"{key} is only read of {needed_type}, and {config['model']} reads "
                f"{listed(names) or 'no field'}; leave it out"
            )
