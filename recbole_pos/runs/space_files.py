"""Reading search spaces from yaml and RecBole's ``.hyper`` and ``.test``, and checking them.

A wrong line is an error before the first trial.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from recbole_pos.config.option import DATA, SCHEDULE
from recbole_pos.config.options import rule
from recbole_pos.errors import UsageError
from recbole_pos.runs.space import KINDS, Parameter, Space
from recbole_pos.values import is_number, shown, suggest
from recbole_pos.yaml_files import ROOT, YamlLoader, parse_scalar

_LARGEST = 700  # natural logarithm of what a float can be
RECBOLE_SUFFIXES = (".hyper", ".test")


def space_file(given: str | Path | None, model: str) -> Path:
    """Return a space file: the given one, one of that name in ``properties/tune/``, or the model's.

    Args:
        given: path or name of the file; None for the one named after the model.
        model: name of the model.

    Raises:
        UsageError: if there is no such file.
    """
    shipped = ROOT / "tune"
    choices = ", ".join(sorted(file.name for file in shipped.glob("*.yaml")))
    if given is None:
        file = shipped / f"{model}.yaml"
        if not file.is_file():
            raise UsageError(
                f"--space: {model} has no space of its own; write one (docs/tuning.md shows how) "
                f"or start from one of {choices}"
            )
        return file
    file = Path(given)
    with suppress(OSError):  # for a name that no file can have
        for candidate in (file, shipped / file, shipped / file.name):
            if candidate.is_file():
                return candidate
    raise UsageError(f"--space: no file {shown(str(given))}; spaces that come along are {choices}")


def read_space(path: str | Path) -> Space:
    """Return the space in a file.

    Raises:
        UsageError: naming file and line of what is wrong.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read space file {path}: {error}") from error
    space = _read_recbole(path, text) if path.suffix in RECBOLE_SUFFIXES else _read_yaml(path, text)
    if not space.parameters:
        raise UsageError(
            f"{path} searches nothing; a line that searches looks like "
            "`learning_rate: {loguniform: [1e-4, 1e-2]}`"
        )
    return space


def _read_yaml(path: Path, text: str) -> Space:
    """Return the space in the text of a yaml file, whose path is for messages."""
    loader = YamlLoader(text)
    try:
        root = loader.get_single_node()
        if root is None or not isinstance(root, yaml.MappingNode):
            raise UsageError(f"space file {path} must hold `option: ...` lines")
        entries = [
            (loader.construct_object(key, deep=True), loader.construct_object(value, deep=True),
             f"{path}, line {key.start_mark.line + 1}")
            for key, value in root.value
        ]  # fmt: skip
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or error
        raise UsageError(f"{path}{line}: not valid yaml: {str(problem)[:200]}") from error
    finally:
        loader.dispose()
    return _build_space(entries)


def parse_space(content: Mapping[str, Any], lines: Mapping[str, str]) -> Space:
    """Return a space that is part of another file.

    Args:
        content: option -> how it is sampled, as in a space file.
        lines: option -> file and line.

    Raises:
        UsageError: naming file and line of what is wrong.
    """
    space = _build_space([(name, value, lines.get(name, name)) for name, value in content.items()])
    if not space.parameters:
        first = next(iter(lines.values()), "space")
        raise UsageError(
            f"{first}: the space searches nothing; a line that searches looks like "
            "`learning_rate: {loguniform: [1e-4, 1e-2]}`"
        )
    return space


def _build_space(entries: Iterable[tuple[Any, Any, str]]) -> Space:
    """Return the space of entries: option, how it is sampled or its fixed value, file and line."""
    parameters, fixed, lines = [], {}, dict[str, str]()
    for name, value, where in entries:
        _require_new(name, where, lines)
        lines[name] = where
        parameter = _parameter(name, value, where)
        if parameter:
            parameters.append(parameter)
        else:
            fixed[name] = value
    return Space(parameters, fixed, lines)


def _require_new(name: Any, where: str, lines: dict[str, str]) -> None:
    """Raise a UsageError for an option that is not a name, or is in ``lines`` already."""
    if not isinstance(name, str) or len(name) > 100:
        raise UsageError(
            f"{where}: the name of an option is text of at most 100 characters, found {shown(name)}"
        )
    if name in lines:
        raise UsageError(f"{where}: {shown(name)} is given already, at {lines[name]}")


def _parameter(name: str, value: Any, where: str) -> Parameter | None:
    """Return a searched option, or None for a fixed value.

    Raises:
        UsageError: for an unknown kind, several kinds, or a condition that is not a mapping.
    """
    if not isinstance(value, dict):
        return None
    kinds = [key for key in value if key in KINDS]
    rest = [key for key in value if key not in KINDS and key != "when"]
    if not kinds:
        misspelled = [key for key in rest if suggest(str(key), KINDS)]
        if misspelled or "when" in value:
            word = misspelled[0] if misspelled else "when alone"
            hint = suggest(str(word), KINDS) if misspelled else ""
            raise UsageError(
                f"{where}: {name}: cannot search by {shown(word)}{hint}; known are "
                f"{', '.join(KINDS)}"
            )
        return None  # an option that is a mapping, such as eval_args
    if len(kinds) > 1 or rest:
        raise UsageError(
            f"{where}: {name}: expected one of {', '.join(KINDS)}, and perhaps when; "
            f"found {shown(list(value))}"
        )
    when = value.get("when", {})
    if not isinstance(when, dict):
        raise UsageError(f"{where}: {name}: when is a mapping such as {{fusion: early}}")
    allowed = {key: list(v) if isinstance(v, list) else [v] for key, v in when.items()}
    return Parameter(name, kinds[0], value[kinds[0]], where, allowed)


def _read_recbole(path: Path, text: str) -> Space:
    """Return the space in a file of RecBole, ``name kind values`` on each line, without ``eval``.

    Ends of loguniform are natural logarithms in the file, as for hyperopt, and values in the space.
    RecBole silently skips lines of fewer than three words; here only empty lines and comments are.
    """
    parameters, lines = [], dict[str, str]()
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{path}, line {number}"
        words = line.split(maxsplit=2)
        if not words or words[0].startswith("#"):
            continue
        if len(words) < 3:
            raise UsageError(f"{where}: expected `option kind values`, found {shown(line.strip())}")
        name, kind, written = words
        _require_new(name, where, lines)
        lines[name] = where
        if kind not in ("choice", "uniform", "loguniform", "quniform"):
            raise UsageError(
                f"{where}: {name}: unknown kind {shown(kind)}; RecBole's are choice, uniform, "
                "loguniform, quniform"
            )
        values = parse_scalar(
            written if written.startswith("[") else f"[{written}]", f"{where}: {name}"
        )
        if isinstance(values, list) and kind == "choice":
            values = [_parse_choice(value, f"{where}: {name}") for value in values]
        if kind == "loguniform" and isinstance(values, list):
            if not all(is_number(value) and value < _LARGEST for value in values):
                raise UsageError(
                    f"{where}: {name}: loguniform takes low,high, found {shown(written)}"
                )
            values = [math.exp(value) for value in values]
        parameters.append(Parameter(name, kind, values, where))
    return Space(parameters, {}, lines)


def _parse_choice(value: Any, where: str) -> Any:
    """Return a choice of a RecBole file, in which None, lists and mappings are written as text."""
    if value == "None":
        return None
    is_text = isinstance(value, str) and value[:1] in ("[", "{")
    return parse_scalar(value, where) if is_text else value


def check_fixed(space: Space, build: Callable[[dict[str, Any]], Any]) -> Any:
    """Return the configuration that all trials share, with the fixed options of a space.

    Raises:
        UsageError: naming the line of the fixed option that the error names, if it names one.
    """
    try:
        return build({})
    except UsageError as error:
        named = (space.lines[name] for name in space.fixed if name in str(error))
        where = next(named, None)
        if where is None:
            raise
        raise UsageError(f"{where}: {_bare(error)}") from error


def fit_space(space: Space, build: Callable[[dict[str, Any]], Any]) -> Any:
    """Check a space against its configuration, whose options its conditions may name.

    Args:
        space: the space; its ``context`` is set to the options that its conditions name and that
            are not searched.
        build: as of :func:`check_space`.

    Returns:
        The configuration that all trials share.

    Raises:
        UsageError: naming the line of the file.
    """
    config = check_fixed(space, build)
    space.context = config.plain
    check_space(space, build)
    named = {name for parameter in space.parameters for name in parameter.when} - set(space.names)
    space.context = {key: value for key, value in config.plain.items() if key in named}
    return config


def check_space(space: Space, build: Callable[[dict[str, Any]], Any]) -> None:
    """Build a configuration with every parameter at each of its ends, under its condition.

    Args:
        space: the space; its context has the options of the configuration.
        build: makes a configuration of sampled options and the fixed ones, or raises UsageError.

    Raises:
        UsageError: naming the line of the file.
    """
    for parameter in space.parameters:
        role = rule(parameter.name).role
        if role == DATA:
            raise UsageError(
                f"{parameter.where}: {parameter.name} cannot be searched: data, split and metrics "
                "are the same for all trials; run one search for each value"
            )
        if role == SCHEDULE:
            raise UsageError(
                f"{parameter.where}: {parameter.name} cannot be searched: the scheduler and early "
                f"stopping decide how long a trial trains; give one value, {parameter.name}: ..."
            )
        for name in parameter.when:
            if name not in space.names and name not in space.context:
                raise UsageError(
                    f"{parameter.where}: {parameter.name}: its condition names {shown(name)}, "
                    "which is neither searched here nor an option of the model"
                )
    for parameter, options in space.combinations():
        try:
            build(options)
        except UsageError as error:
            raise UsageError(f"{parameter.where}: {_bare(error)}") from error


def _bare(error: UsageError) -> str:
    """Return the text of an error without the place that a file and line replace."""
    return str(error).removeprefix("configuration: ")
