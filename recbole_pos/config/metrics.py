"""Metrics beside RecBole's evaluator: functions of the user's, and metrics of saved ranks.

:func:`register_metric` makes a metric of RecBole's evaluator of a user's function. Then ``metrics``
and ``valid_metric`` of a run, tables of a study and ``evaluate`` take its name.
:func:`compute_gains` computes a metric, such as ``ndcg@10``, from the ranks that runs have saved.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recbole_pos.errors import UsageError
from recbole_pos.registry import find_importing_module
from recbole_pos.values import shown

if TYPE_CHECKING:
    import numpy as np

# Names of what an evaluation collects: rank of each target from 0, its interaction, the best items
# of its row, and the dataset.
RANK, EVENT, ITEMS, DATASET = "rec.rank", "rec.event", "rec.items", "data.dataset"
# Metrics that are the mean of a gain of each target, which is the only relevant item of its list.
_GAIN_METRICS = ("hit", "recall", "precision", "ndcg", "mrr", "map")
# A name with its cutoff, such as ndcg@10.
_RANK_METRIC = re.compile(r"([a-z]+)@([1-9]\d*)")


@dataclass(frozen=True)
class CustomMetric:
    """A metric that a user has registered.

    Attributes:
        function: the function, whose arguments have the names that :func:`register_metric` lists.
        bigger: whether a higher value is better.
        module: the module whose import registers it again; None if no import does (a notebook).
    """

    function: Callable[..., Any]
    bigger: bool
    module: str | None

    @property
    def arguments(self) -> list[str]:
        """Names of the arguments of the function."""
        return list(inspect.signature(self.function).parameters)


CUSTOM: dict[str, CustomMetric] = {}  # name in lower case -> registered metric


def register_metric(name: str, function: Callable[..., Any], bigger: bool = True) -> None:
    """Register a metric of one's own under a name, as one of the option ``metrics``.

    The names of its arguments say what the function is given of an evaluation:

    - ``ranks``: [targets] rank of each target, 1 for the first;
    - ``lists``: [targets, k] ids of the best items for each target, the best first;
    - ``targets``: [targets] ids of the targets;
    - ``k``: the cutoff;
    - any other name: that attribute of all items by id, [items] or, of lists, [items, length], as
      numbers; names are codes, and 0 stands for none.

    Args:
        name: its name; with ``lists`` or ``k``, ``NAME@10`` is its value for the cutoff 10.
        function: returns a number, or an array with one for each target, whose mean is the metric.
        bigger: whether a higher value is better, for ``valid_metric``.

    Raises:
        UsageError: if the name is no identifier, or that of a metric of RecBole's.

    Example::

        def same_category(lists, targets, category):
            return (category[lists] == category[targets][:, None]).any(1)

        recbole_pos.register_metric("same_category", same_category)
        recbole_pos.run("FPARec", "shop", config_dict={"metrics": ["NDCG", "same_category"]})
    """
    # The module that calls this function is kept: other processes import it to know the metric.
    module = find_importing_module(sys._getframe(1))
    add_metric(name, CustomMetric(function, bigger, module))


def add_metric(name: str, metric: CustomMetric) -> None:
    """Make a user's metric known to RecBole's evaluator, as one of its own.

    RecBole looks up the class of a metric by its name. So a subclass of ``_EvaluatedFunction``,
    which calls the user's function, is entered into RecBole's tables under this name.

    Args:
        name: its name, in whatever case; options may write it in any.
        metric: the user's function, whether more is better, and the module that registers it.

    Raises:
        UsageError: if the name is no identifier, or that of a metric of RecBole's.
    """
    # Imported here, since commands that only list or explain need not wait for torch.
    from recbole.evaluator import register
    from recbole.utils import EvaluatorType

    # A metric that was registered here before may be replaced; one of RecBole's may not.
    key = str(name).lower()
    known = register.metrics_dict.get(key, _EvaluatedFunction)
    if not str(name).isidentifier() or not issubclass(known, _EvaluatedFunction):
        raise UsageError(
            f"register_metric: found the name {shown(name)}, expected one of letters, digits and _ "
            "that no metric of RecBole has"
        )

    # Enter it among the user's metrics, and in RecBole's tables the class that computes it.
    CUSTOM[key] = metric
    register.metrics_dict[key] = type(name, (_EvaluatedFunction,), {"key": key})
    register.metric_types[key] = EvaluatorType.RANKING  # a metric of ranked items

    # RecBole collects only what some metric needs: ranks of targets (RANK), best items (ITEMS).
    needs_lists = "lists" in metric.arguments
    register.metric_information[key] = [RANK, ITEMS] if needs_lists else [RANK]
    if not metric.bigger:  # a smaller value is better
        register.smaller_metrics.append(key)


def is_from_ranks(metric: str) -> bool:
    """Return whether a metric's name (``ndcg@10``) is one that :func:`compute_gains` knows."""
    match = _RANK_METRIC.fullmatch(metric.lower())
    return match is not None and match[1] in _GAIN_METRICS


def compute_gains(rank: np.ndarray, metric: str) -> np.ndarray:
    """Return how much each test target adds to a metric; the mean over targets is the metric.

    For ``ndcg@2``, targets at the ranks [0, 1, 2] have the gains [1, 0.63, 0].

    Args:
        rank: [..., targets] ranks among all items, 0 for the first; a half rank is allowed for
            ties, infinity for a target that cannot be ranked. The gains have the same shape.
        metric: name and cutoff, such as ``ndcg@10``, for which :func:`is_from_ranks` is true.
    """
    import numpy as np  # here, since names of metrics are listed without it

    name, _, cutoff = metric.lower().partition("@")
    rank, k = np.asarray(rank, dtype=float), int(cutoff)
    gains = np.ones_like(rank)  # hit and recall
    if name == "precision":
        gains = gains / k
    elif name == "ndcg":
        gains = 1 / np.log2(rank + 2)
    elif name in ("mrr", "map"):
        gains = 1 / (rank + 1)
    return np.where(rank < k, gains, 0.0)


def has_cutoff(name: str) -> bool:
    """Return whether a metric has a value for each cutoff (``topk``), such as ``NDCG@10``.

    All of RecBole's ranking metrics do, except GAUC. A metric that a user has registered does if
    its function has an argument ``lists`` or ``k``, since only these depend on the cutoff.
    """
    metric = CUSTOM.get(name.lower())  # CUSTOM: the metrics that users have registered
    if metric is None:  # it is one of RecBole's
        return name.lower() != "gauc"
    return not {"lists", "k"}.isdisjoint(metric.arguments)


class _EvaluatedFunction:
    """A user's metric in the form that RecBole's evaluator expects of a metric.

    :func:`add_metric` makes a subclass of it for each metric.

    Attributes:
        key: name of the metric in lower case, under which ``CUSTOM`` has its function.
    """

    key = ""

    def __init__(self, config: Any) -> None:
        # How values are rounded, and the cutoffs; [None] for a metric without any.
        self.decimal_place = config["metric_decimal_place"]
        self.cutoffs = config["topk"] if has_cutoff(self.key) else [None]

    def calculate_metric(self, dataobject: Any) -> dict[str, float]:
        """Call the user's function with what it asks for, and return the metric's value by name.

        Args:
            dataobject: what RecBole's evaluator has collected over all batches. Its method ``get``
                returns for RANK [targets] the rank of each target (the item to predict), from 0;
                for EVENT [targets] the number of its interaction in the dataset; for ITEMS
                [targets, items] the best items; and for DATASET the dataset.

        Returns:
            ``{"name@5": ..., "name@10": ...}`` for a metric with cutoffs, else ``{"name": ...}``.
        """
        # Collect a value for each argument of the user's function, by the argument's name. Those
        # that depend on the cutoff, ``k`` and ``lists``, follow below.
        metric = CUSTOM[self.key]
        arguments: dict[str, Any] = {}
        for name in metric.arguments:
            if name == "ranks":
                arguments[name] = dataobject.get(RANK).numpy() + 1
            elif name == "targets":
                items = dataobject.get(DATASET).log.items  # the item of each interaction
                arguments[name] = items[dataobject.get(EVENT)].numpy()
            elif name not in ("k", "lists"):  # any other name is an attribute of items
                arguments[name] = _read_attribute(dataobject.get(DATASET), name, self.key)

        # Call the function once for each cutoff; without cutoffs k is None.
        values: dict[str, float] = {}
        for k in self.cutoffs:
            if "k" in metric.arguments:
                arguments["k"] = k
            if "lists" in metric.arguments:
                arguments["lists"] = dataobject.get(ITEMS)[:, :k].numpy()
            value = metric.function(**arguments)

            # The function may return one number, or an array with a number for each target.
            mean = value.mean() if hasattr(value, "mean") else value
            name = self.key if k is None else f"{self.key}@{k}"
            values[name] = round(float(mean), self.decimal_place)
        return values


def _read_attribute(dataset: Any, field: str, metric: str) -> np.ndarray:
    """Return an attribute of all items, such as their category, as an array by item id.

    Args:
        dataset: the dataset of the evaluation; ``item_feat`` is its table of items, by field.
        field: name of the attribute.
        metric: name of the metric that asks for it, for the message.

    Returns:
        [items] numbers, or [items, length] where an item has several.

    Raises:
        UsageError: if the dataset was read without this attribute.
    """
    if dataset.item_feat is None or field not in dataset.item_feat:
        raise UsageError(
            f"metrics: {metric} asks for {field}, which is neither ranks, lists, targets or k nor "
            "an attribute of items that was read; add it to load_col"
        )
    return dataset.item_feat[field].numpy()
