"""From configuration and data to a model: what does not fit together is said before it fails."""

from __future__ import annotations

from typing import Any

from recbole_pos.allocation import Allocations, check_scores
from recbole_pos.config import PosConfig
from recbole_pos.data.attributes import check_selected, loaded_fields
from recbole_pos.errors import UsageError

# How RecBole's models refuse options they cannot work with.
_REFUSALS = (
    *(ValueError, TypeError, RuntimeError, IndexError, ArithmeticError, NotImplementedError),
    *(AssertionError, AttributeError, MemoryError),
)


def build_model(config: PosConfig, dataset: Any, train: Any) -> Any:
    """The model on its device.

    Args:
        config: of the run.
        dataset: before the split.
        train: its training part.

    Raises:
        UsageError: if options and data do not fit the model, or the model not the memory.
    """
    if "selected_features" in config:
        check_selected(dataset, config["selected_features"])
    check_scores(config, dataset)
    try:
        with Allocations(config, dataset):
            model = config.model_class(config, train)
        return model.to(config["device"])
    except UsageError:
        raise
    except KeyError as error:  # a field is missing
        raise UsageError(
            f"{config['model']} needs {error}, but the fields loaded are "
            f"{', '.join(loaded_fields(dataset))}; see load_col, and selected_features for models "
            "that embed attributes"
        ) from error
    except _REFUSALS as error:
        raise UsageError(f"{config['model']} cannot be built: {error}") from error
