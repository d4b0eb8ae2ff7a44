"""Search spaces: parameters, how each is sampled, and under which conditions it exists.

One description serves all searchers: Optuna samples values by name, the grid lists them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from recbole_pos.errors import UsageError
from recbole_pos.values import is_number, shown

KINDS = {
    "choice": "a list of values",
    "uniform": "[low, high]",
    "loguniform": "[low, high], both above 0",
    "quniform": "[low, high, step]",
    "randint": "[low, high], whole numbers, both included",
}

MOST_POINTS = 100_000  # points of a grid, and listed values of a parameter, at most


@dataclass(frozen=True)
class Parameter:
    """One searched option.

    Attributes:
        name: the option.
        kind: one of ``KINDS``.
        values: the choices, or low, high and for quniform the step.
        where: file and line, for messages.
        when: other option -> its values under which this parameter exists; all must hold.
    """

    name: str
    kind: str
    values: list[Any]
    where: str
    when: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise a UsageError for values that the kind does not take."""
        kind, values = self.kind, self.values
        if not isinstance(values, list):
            self._refuse(f"{kind} takes {KINDS[kind]}, found {shown(values)}")
        if kind == "choice":
            if not values:
                self._refuse("choice has no values to choose from")
            twice = [value for n, value in enumerate(values) if value in values[:n]]
            if twice:
                self._refuse(f"{shown(twice[0])} is listed twice")
            return
        if len(values) != (3 if kind == "quniform" else 2) or not all(map(is_number, values)):
            self._refuse(f"{kind} takes {KINDS[kind]}, found {shown(values)}")
        low, high = values[:2]
        if low > high or (low == high and kind != "randint"):
            self._refuse(f"the range from {shown(low)} to {shown(high)} is empty")
        if kind == "loguniform" and low <= 0:
            self._refuse(
                f"loguniform needs a low end above 0, found {shown(low)}; ends are the values "
                "themselves, not their logarithms as in RecBole's .hyper files"
            )
        if kind == "randint" and not all(isinstance(value, int) for value in values):
            self._refuse(f"randint takes whole numbers, found {shown(values)}")
        if kind == "quniform" and values[2] <= 0:
            self._refuse(f"the step must be above 0, found {shown(values[2])}")

    def _refuse(self, problem: str) -> None:
        raise UsageError(f"{self.where}: {self.name}: {problem}")

    @property
    def steps(self) -> int:
        """Number of steps from the low end of quniform to its high end."""
        low, high, step = self.values
        rounding = 1e-9  # of the division: from 0 to 0.3 there are three steps of 0.1
        return int(math.floor((high - low) / step + rounding))

    def on_grid(self, number: int) -> int | float:
        """Return the value ``number`` steps above the low end, rounded to 12 digits."""
        low, _, step = self.values
        value = low + number * step
        return value if isinstance(value, int) else float(f"{value:.12g}")

    def ends(self) -> list[Any]:
        """Return the values to check for all others: every choice, or both ends of the range."""
        if self.kind == "quniform":
            return [self.on_grid(0), self.on_grid(self.steps)]
        if self.kind in ("uniform", "loguniform"):
            return [float(value) for value in self.values]  # as all sampled values are
        return self.values

    @property
    def count(self) -> float:
        """Number of values; infinite for uniform and loguniform."""
        if self.kind == "choice":
            return len(self.values)
        if self.kind == "randint":
            return self.values[1] - self.values[0] + 1
        return self.steps + 1 if self.kind == "quniform" else math.inf

    def all_values(self) -> list[Any]:
        """Return every value, for a grid.

        Raises:
            UsageError: where there are infinitely many, or too many to list.
        """
        if self.count > MOST_POINTS and self.count != math.inf:
            self._refuse(f"{self.count:,} values are too many to list; use choice or larger steps")
        if self.kind == "choice":
            return self.values
        if self.kind == "randint":
            return list(range(self.values[0], self.values[1] + 1))
        if self.kind == "quniform":
            return [self.on_grid(number) for number in range(self.steps + 1)]
        self._refuse(f"a grid needs values to list, {self.kind} has none; use choice or quniform")
        raise AssertionError

    def has(self, value: Any) -> bool:
        """Return whether a value can be sampled."""
        if self.kind in ("choice", "quniform"):
            return value in self.all_values()
        low, high = self.values
        within = is_number(value) and low <= value <= high
        return within and (self.kind != "randint" or value == int(value))

    def suggest(self, trial: Any) -> Any:
        """Return the value that an ``optuna.Trial`` suggests.

        Optuna gets the numbers of choices, which may be lists.
        """
        if self.kind == "choice":
            return self.values[trial.suggest_categorical(self.name, list(range(len(self.values))))]
        low, high = self.values[:2]
        if self.kind == "randint":
            return trial.suggest_int(self.name, low, high)
        if self.kind == "quniform":
            return self.on_grid(trial.suggest_int(self.name, 0, self.steps))
        return trial.suggest_float(self.name, low, high, log=self.kind == "loguniform")

    def suggested(self, value: Any) -> Any:
        """Return the value of an ``optuna.Trial`` for which :meth:`suggest` returns ``value``."""
        if self.kind == "choice":
            return self.values.index(value)
        if self.kind == "quniform":
            low, _, step = self.values
            return round((value - low) / step)
        return value


@dataclass
class Space:
    """The parameters of a search, ordered so that conditions name earlier parameters only.

    Attributes:
        parameters: the searched options.
        fixed: options that the space file sets for every trial.
        context: values of options that conditions name and that are not searched.
        lines: searched or fixed option -> file and line.
    """

    parameters: list[Parameter]
    fixed: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    context: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parameters = _parents_first(self.parameters)

    @property
    def names(self) -> list[str]:
        """Names of the parameters."""
        return [parameter.name for parameter in self.parameters]

    def without(self, names: Any) -> Space:
        """Return the space without options that the user gives a value."""
        left = [parameter for parameter in self.parameters if parameter.name not in names]
        fixed = {key: value for key, value in self.fixed.items() if key not in names}
        return Space(left, fixed, self.lines, self.context)

    def exists(self, parameter: Parameter, options: dict[str, Any]) -> bool:
        """Return whether the options sampled so far meet the condition of a parameter."""
        for name, allowed in parameter.when.items():
            is_searched = name in self.names
            if is_searched and name not in options:  # its own condition does not hold
                return False
            if (options if is_searched else self.context).get(name) not in allowed:
                return False
        return True

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Return the options that an ``optuna.Trial`` suggests."""
        options: dict[str, Any] = {}
        for parameter in self.parameters:
            if self.exists(parameter, options):
                options[parameter.name] = parameter.suggest(trial)
        return options

    def suggested(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the values of an ``optuna.Trial`` for which :meth:`suggest` gives ``options``."""
        return {p.name: p.suggested(options[p.name]) for p in self.parameters if p.name in options}

    def points(self, most: int = 10_000) -> int | None:
        """Return the number of combinations; None if it is infinite or above ``most``."""
        if any(parameter.count > most for parameter in self.parameters):
            return None
        count = len(self.grid(most))
        return count if count <= most else None

    def grid(self, most: int = MOST_POINTS) -> list[dict[str, Any]]:
        """Return all combinations, in the order of the file, the last parameter changing first.

        Args:
            most: the list is cut off once it has more combinations than this.
        """
        combinations: list[dict[str, Any]] = [{}]
        for parameter in self.parameters:
            values, grown = parameter.all_values(), list[dict[str, Any]]()
            for options in combinations:
                if self.exists(parameter, options):
                    grown += [{**options, parameter.name: value} for value in values]
                else:
                    grown.append(options)
                if len(grown) > most:
                    return grown
            combinations = grown
        return combinations

    def combinations(self) -> Iterator[tuple[Parameter, dict[str, Any]]]:
        """Yield each parameter at each of its ends, with options under which it exists.

        Raises:
            UsageError: for a condition that never holds.
        """
        for parameter in self.parameters:
            base = self.making(parameter)
            if base is None:
                raise UsageError(
                    f"{parameter.where}: {parameter.name}: its condition "
                    f"{shown(parameter.when)} never holds"
                )
            for value in parameter.ends():
                yield parameter, {**base, parameter.name: value}

    def making(self, *parameters: Parameter) -> dict[str, Any] | None:
        """Return values of other parameters under which these exist; None if there are none.

        Conditions of the parameters that they depend on are met, too.
        """
        searched = {p.name: p for p in self.parameters}
        wanted: dict[str, list[Any]] = {}
        waiting = list(parameters)
        while waiting:
            for name, allowed in waiting.pop().when.items():
                if name not in searched:
                    if self.context.get(name) not in allowed:
                        return None
                    continue
                if name not in wanted:
                    waiting.append(searched[name])
                values = wanted.get(name, allowed)
                wanted[name] = [v for v in values if v in allowed and searched[name].has(v)]
        if not all(wanted.values()):
            return None
        return {name: values[0] for name, values in wanted.items()}


def _parents_first(parameters: list[Parameter]) -> list[Parameter]:
    """Return parameters in an order in which conditions name earlier ones.

    Raises:
        UsageError: for conditions in a circle.
    """
    waiting, ordered = {p.name: p for p in parameters}, list[Parameter]()
    while waiting:
        following = next((p for p in waiting.values() if not set(p.when) & set(waiting)), None)
        if following is None:
            first = next(iter(waiting.values()))
            raise UsageError(
                f"{first.where}: {first.name}: its condition depends on itself, by way of "
                f"{shown(list(first.when))}"
            )
        ordered.append(waiting.pop(following.name))
    return ordered
