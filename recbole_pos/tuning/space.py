"""Search spaces: the searched options, how each is sampled, and the yaml files that list them.

:func:`read_space` returns the :class:`Space` of a file, and :func:`check_space` checks it with a
model, so that a wrong line is an error before the first trial. All searchers use the same space:
Optuna samples values by name, and a grid search lists them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recbole_pos.config.checks import as_list
from recbole_pos.config.options import DATA, SCHEDULE, find_option
from recbole_pos.errors import UsageError
from recbole_pos.study.plan import find_repeated
from recbole_pos.values import is_number, is_whole, shown
from recbole_pos.yaml_files import ROOT, read_with_lines

# How an option is sampled -> the values that this takes in a space file, for messages.
KINDS = {
    "choice": "a list of different values",
    "uniform": "[low, high], low below high",
    "loguniform": "[low, high], low below high, values above 0 and not their logarithms",
    "quniform": "[low, high, step], the step above 0",
    "randint": "[low, high], whole numbers, both included",
}
_ROUNDING = 1e-9  # error of a division: there are three steps of 0.1 up to 0.3, not 2.9999999999


@dataclass(frozen=True)
class Parameter:
    """One searched option.

    Attributes:
        name: the option.
        kind: how it is sampled, see ``KINDS``.
        values: the choices; or low, high and for quniform the step.
        location: file and line, for messages.
        when: other option -> values that it must have for this parameter to exist in a trial; all
            conditions must be met.
    """

    name: str
    kind: str
    values: list[Any]
    location: str
    when: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise a UsageError if the values are not what the kind takes, see ``KINDS``."""
        if not (isinstance(self.values, list) and self._has_valid_values()):
            raise UsageError(
                f"{self.location}: {self.name}: {self.kind} takes {KINDS[self.kind]}, found "
                f"{shown(self.values)}"
            )

    def _has_valid_values(self) -> bool:
        """Return whether the values of a searched option are what its kind of sampling takes.

        A ``choice`` takes different values; ``uniform``, ``loguniform`` and ``randint`` a low and a
        high end; ``quniform`` both ends and a step.
        """
        if self.kind == "choice":
            return bool(self.values) and not find_repeated(self.values)
        if not all(map(is_number, self.values)):
            return False
        # Too few or too many values match none of the cases.
        match self.kind, self.values:
            case "uniform", [low, high]:
                return low < high
            case "loguniform", [low, high]:
                return 0 < low < high
            case "randint", [low, high]:
                return is_whole(low) and is_whole(high) and low <= high
            case "quniform", [low, high, step]:
                # A step so small that the number of steps is infinite is refused.
                return low < high and step > 0 and is_number((high - low) / step)
        return False

    @property
    def choices(self) -> Sequence[Any] | None:
        """All values that the option can have, in order; None if there are infinitely many.

        Optuna samples the index of a value in this list, such as 2 for the 0.2 of a ``quniform``
        with ``[0, 0.3, 0.1]``.
        """
        if self.kind == "choice":
            return self.values
        if self.kind == "randint":
            return range(self.values[0], self.values[1] + 1)
        if self.kind == "quniform":
            low, high, step = self.values
            # 0.3 / 0.1 is 2.9999999999999996, which _ROUNDING lifts to 3 steps.
            num_steps = int((high - low) / step + _ROUNDING)
            values = [low + number * step for number in range(num_steps + 1)]
            # Twelve digits remove errors of rounding: 3 * 0.1 becomes 0.3.
            return [value if isinstance(value, int) else float(f"{value:.12g}") for value in values]
        return None

    @property
    def extremes(self) -> Sequence[Any]:
        """The values that are checked before a search: every choice, or both ends of a range."""
        if self.kind == "choice":
            return self.values
        if self.choices is None:  # any number of a range, whose ends are ``values``
            return [float(value) for value in self.values]  # sampled values are float, too
        return [self.choices[0], self.choices[-1]]

    def has(self, value: Any) -> bool:
        """Return whether a searched option can have a value, of any type."""
        if self.choices is not None:
            return value in self.choices
        low, high = self.values
        return is_number(value) and low <= value <= high

    def encode(self, value: Any) -> Any:
        """Return what Optuna samples for a value: its index, or the value itself.

        For the choices ``[early, late]``, ``late`` has the index 1. A ``uniform`` or ``loguniform``
        option has no list of values, so that the value itself is sampled.

        Args:
            value: a value that the option can have.
        """
        return value if self.choices is None else list(self.choices).index(value)

    def suggest(self, trial: Any) -> Any:
        """Return the value of a searched option that a trial of Optuna samples.

        Args:
            trial: an ``optuna.Trial``. It samples by name, from the distribution of the option.
        """
        # Without a list of values (``choices``) a real number is sampled, otherwise the index of
        # one of them. Only indices of a ``choice`` have no order.
        if self.choices is None:
            low, high = self.values
            return trial.suggest_float(self.name, low, high, log=self.kind == "loguniform")
        if self.kind == "choice":
            index = trial.suggest_categorical(self.name, range(len(self.choices)))
        else:
            index = trial.suggest_int(self.name, 0, len(self.choices) - 1)
        return self.choices[index]


@dataclass
class Space:
    """The parameters of a search, ordered so that conditions name earlier parameters only.

    Attributes:
        parameters: the searched options.
        fixed: options that the space file sets to one value for every trial.
        context: option -> value, of all options that are the same in every trial. Conditions may
            name them; :func:`check_space` fills them in.
    """

    parameters: list[Parameter]
    fixed: dict[str, Any] = field(default_factory=dict)
    context: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Order the parameters so that each comes after those that its condition names.

        A parameter is a searched option. Its condition (``when``: option -> allowed values) says in
        which trials it exists, so the named options have to be sampled before it.

        Raises:
            UsageError: if conditions depend on each other in a circle.
        """
        waiting = {parameter.name: parameter for parameter in self.parameters}
        ordered: list[Parameter] = []
        while waiting:
            # Take the first parameter whose condition names none of those that still wait.
            ready = [p for p in waiting.values() if not p.when.keys() & waiting.keys()]
            if not ready:
                first = next(iter(waiting.values()))
                raise UsageError(f"{first.location}: {first.name}: its condition depends on itself")
            ordered.append(waiting.pop(ready[0].name))
        self.parameters = ordered

    @property
    def names(self) -> list[str]:
        """Names of the parameters."""
        return [parameter.name for parameter in self.parameters]

    @property
    def content(self) -> dict[str, Any]:
        """The searched options as a space file has them.

        An example is ``{"n_heads": {"choice": [1, 2]}, "dropout": {"uniform": [0.1, 0.5]}}``. An
        option that exists only in some trials also has ``when``: other option -> allowed values.
        """
        return {
            p.name: {p.kind: p.values, "when": p.when} if p.when else {p.kind: p.values}
            for p in self.parameters
        }

    def without(self, names: Any) -> Space:
        """Return the space without the named options, searched or fixed."""
        parameters = [parameter for parameter in self.parameters if parameter.name not in names]
        fixed = {key: value for key, value in self.fixed.items() if key not in names}
        return Space(parameters, fixed, self.context)

    def exists(self, parameter: Parameter, options: dict[str, Any]) -> bool:
        """Return whether a parameter (a searched option) exists in a trial.

        It does if every option that its condition ``when`` names has an allowed value. With ``when:
        {fusion: [early]}`` it exists only in trials with early fusion.

        Args:
            parameter: the parameter.
            options: options of the trial that have been sampled so far.
        """
        # ``context`` has the options that are the same in every trial.
        values = {**self.context, **options}
        return all(
            # An option that does not exist in the trial has no value, and meets no condition.
            name in values and values[name] in allowed
            for name, allowed in parameter.when.items()
        )

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Return the searched options of a trial, sampled by Optuna.

        Options whose conditions are not met do not exist in the trial and are left out.

        Args:
            trial: an ``optuna.Trial``, which samples one option at a time.
        """
        # Parameters (searched options) are in an order in which each comes after those that its
        # condition names.
        options: dict[str, Any] = {}
        for parameter in self.parameters:
            if self.exists(parameter, options):
                options[parameter.name] = parameter.suggest(trial)
        return options

    def encode(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return what Optuna samples for given options: option -> index of its value, or the value.

        It is the inverse of :meth:`suggest`: a trial of Optuna with these values suggests the
        options.
        """
        return {p.name: p.encode(options[p.name]) for p in self.parameters if p.name in options}

    def list_points(self) -> list[dict[str, Any]]:
        """Return all combinations of values, for a grid search; the last parameter changes first.

        A parameter (searched option) whose conditions are not met is left out of the combination.
        For ``fusion: [early, late]`` and ``heads: [1, 2]`` with ``when: {fusion: early}`` there are
        three: early with 1 head, early with 2, and late.

        Raises:
            UsageError: if a parameter has infinitely many values, as ``uniform`` and
                ``loguniform`` have.
        """
        # Extend the combinations of the earlier parameters by each value of the next. Parameters
        # are in an order in which each comes after those that its condition names.
        combinations: list[dict[str, Any]] = [{}]
        for parameter in self.parameters:
            if parameter.choices is None:  # any real number between two ends
                raise UsageError(
                    f"{parameter.location}: {parameter.name}: a grid needs values to list, and "
                    f"{parameter.kind} has none; use choice"
                )
            extended: list[dict[str, Any]] = []
            for options in combinations:
                if self.exists(parameter, options):
                    extended += [{**options, parameter.name: value} for value in parameter.choices]
                else:
                    extended.append(options)
            combinations = extended
        return combinations

    def meet_conditions(self, parameter: Parameter) -> dict[str, Any]:
        """Return values of other searched options, under which a parameter exists in a trial.

        A parameter is a searched option. Its condition ``when`` has for other options the values
        that they may have. An example: ``fusion_dim`` has ``when: {fusion: [early, both]}``, and
        ``fusion`` has ``when: {n_layers: [2]}``. Then ``{"n_layers": 2, "fusion": "early"}`` is
        returned for ``fusion_dim``: always the first value that is possible.

        Args:
            parameter: the parameter, which is not part of the result.

        Raises:
            UsageError: if its condition never holds: an option that it names is not searched and
                has another value in all trials, or a search never samples an allowed value.
        """
        options: dict[str, Any] = {}
        for other in self.parameters:
            if other.name in parameter.when:
                # The other option must exist as well, so meet its own condition first.
                options |= self.meet_conditions(other)
                # ``has``: whether the search can sample the value for the other option.
                possible = [value for value in parameter.when[other.name] if other.has(value)]
                if possible:
                    options[other.name] = possible[0]

        # ``exists``: whether every option in ``when`` has an allowed value. It also knows the
        # options that are not searched.
        if not self.exists(parameter, options):
            raise UsageError(
                f"{parameter.location}: {parameter.name}: its condition {shown(parameter.when)} "
                "never holds"
            )
        return options


def find_space_file(name: str | Path | None, model: str) -> Path:
    """Return the path of a space file.

    Args:
        name: a path, or the name of a file in ``properties/tune/``. None stands for the file there
            that is named after the model.
        model: name of the model.

    Raises:
        UsageError: if there is no such file.
    """
    folder = ROOT / "tune"  # the spaces that the package brings
    name = f"{model}.yaml" if name is None else name
    for file in (Path(name), folder / Path(name).name):
        if os.path.isfile(file):  # False if the name is too long, where pathlib may raise
            return file
    choices = ", ".join(sorted(file.name for file in folder.glob("*.yaml")))
    raise UsageError(
        f"--space: no file {shown(str(name))}; write one (docs/tuning.md shows how) or take one of "
        f"{choices}"
    )


def read_space(path: str | Path) -> Space:
    """Return the search space in a yaml file; a UsageError names file and line of a mistake."""
    content, lines_by_key = read_with_lines(Path(path), "space file")
    lines = {str(key[0]): line for key, line in lines_by_key.items() if len(key) == 1}
    return parse_space(content, lines)


def parse_space(content: Mapping[Any, Any], lines: Mapping[str, str]) -> Space:
    """Return the search space that the mapping of a yaml file describes.

    Args:
        content: option -> how it is sampled, as in ``{loguniform: [1e-4, 1e-2]}``, or a value that
            it has in every trial.
        lines: option -> file and line, for messages.

    Raises:
        UsageError: naming file and line of what is wrong.
    """
    parameters: list[Parameter] = []
    fixed: dict[str, Any] = {}
    for name, value in content.items():
        name = str(name)
        location = lines.get(name, name)  # without a known line the option itself
        # None if the value does not say how to sample, so that it is the value in all trials.
        if parameter := _parse_parameter(name, value, location):
            parameters.append(parameter)
        else:
            fixed[name] = value
    return Space(parameters, fixed)


def _parse_parameter(name: str, value: Any, location: str) -> Parameter | None:
    """Return a searched option, if its value in a space file says how to sample it.

    Args:
        name: the option.
        value: its value in the file: a mapping of a kind (choice, uniform, loguniform, quniform or
            randint) to its values, and perhaps ``when`` with conditions; or a value that the
            option has in every trial.
        location: file and line, for messages.

    Returns:
        The parameter; None if the value is fixed. A fixed value may be a mapping, too.

    Raises:
        UsageError: if the mapping has a kind or a condition, but is wrong.
    """
    if not isinstance(value, dict) or not value.keys() & {*KINDS, "when"}:
        return None  # the value itself

    # exactly one kind, and no key but it and ``when``
    kinds = [kind for kind in KINDS if kind in value]
    when = value.get("when", {})
    if len(kinds) != 1 or value.keys() - {*kinds, "when"} or not isinstance(when, dict):
        raise UsageError(
            f"{location}: {name}: expected one of {', '.join(KINDS)}, and perhaps when, a mapping "
            f"such as {{fusion: early}}; found {shown(value)}"
        )

    # A condition may be given as one value, which stands for a list of one.
    allowed = {option: as_list(values) for option, values in when.items()}
    return Parameter(name, kinds[0], value[kinds[0]], location, allowed)


def check_space(space: Space, build: Callable[[dict[str, Any]], Any]) -> None:
    """Check a search space before the first trial; nothing is trained.

    Each searched option (parameter) is tried at its extreme values, which are all choices or both
    ends of a range, in a configuration of the other options.

    Args:
        space: the space. Its ``context`` is set to the options that are the same in every trial,
            since a condition (``when``) may name options that are not searched.
        build: makes a configuration of sampled options and the options of all trials, or raises
            UsageError.

    Raises:
        UsageError: with the file and line of a wrong option.
    """
    # First the options of all trials: {} has no sampled option. ``plain`` has every option of the
    # model, also the searched ones, with their defaults.
    options = build({}).plain
    space.context = {name: options[name] for name in options.keys() - set(space.names)}
    for parameter in space.parameters:
        _require_searchable(parameter, {*space.names, *options})
        required = space.meet_conditions(parameter)  # values with which the parameter exists
        for value in parameter.extremes:
            try:
                build({**required, parameter.name: value})
            except UsageError as error:
                problem = str(error).removeprefix("configuration: ")
                raise UsageError(f"{parameter.location}: {problem}") from error


def _require_searchable(parameter: Parameter, known: Collection[str]) -> None:
    """Require that an option may be searched, and that its condition names known options.

    Args:
        parameter: the searched option.
        known: names of the searched options and of all options of the model.

    Raises:
        UsageError: if the condition names an option that does not exist, or if the parameter itself
            is an option that all trials must share.
    """
    prefix = f"{parameter.location}: {parameter.name}"
    # The role of an option is what it decides: DATA are data, split and metrics, SCHEDULE is the
    # length of training.
    if find_option(parameter.name).role in (DATA, SCHEDULE):
        raise UsageError(
            f"{prefix} cannot be searched: data, split, metrics and the length of training are "
            "the same for all trials; give one value"
        )
    for name in parameter.when:
        if name not in known:
            raise UsageError(
                f"{prefix}: its condition names {shown(name)}, which is neither searched here "
                "nor an option of the model"
            )
