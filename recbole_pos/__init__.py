"""recbole-pos: position-aware sequential recommendation for RecBole.

After the import of this package RecBole, whenever it is imported, gets the fixes it needs and finds
the plugin's models by name (``plug.py``), and waiting threads of torch sleep. Everything else is
imported when it is requested.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from recbole_pos import plug
from recbole_pos.version import __version__

if TYPE_CHECKING:
    from recbole_pos.config.metrics import register_metric as register_metric
    from recbole_pos.conversion.convert import convert as convert
    from recbole_pos.experiment.callbacks import Callback as Callback
    from recbole_pos.experiment.folder import Result as Result
    from recbole_pos.experiment.run import attach as attach
    from recbole_pos.experiment.run import evaluate as evaluate
    from recbole_pos.experiment.run import run as run
    from recbole_pos.experiment.run import update as update
    from recbole_pos.layers.hooks import AttentionPosition as AttentionPosition
    from recbole_pos.layers.hooks import InputPosition as InputPosition
    from recbole_pos.layers.sequence_batch import SequenceBatch as SequenceBatch
    from recbole_pos.model.base import PosRecommender as PosRecommender
    from recbole_pos.model.models import register_model as register_model
    from recbole_pos.position.schemes import register_scheme as register_scheme
    from recbole_pos.referee.audit import audit as audit
    from recbole_pos.referee.split import Dataset as Dataset
    from recbole_pos.referee.split import split as split
    from recbole_pos.serve.export import export as export
    from recbole_pos.serve.fit import fit as fit
    from recbole_pos.serve.fit import load as load
    from recbole_pos.serve.recommend import recommend as recommend
    from recbole_pos.serve.recommender import Recommender as Recommender
    from recbole_pos.study.comparing import compare as compare
    from recbole_pos.study.scoring import score as score
    from recbole_pos.tuning import tune as tune

# torch reads it when it is imported: beside a busy process, spinning threads take ten times as long
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
plug.install()

_MODULES = {
    **dict.fromkeys(("attach", "evaluate", "run", "update"), "recbole_pos.experiment.run"),
    "convert": "recbole_pos.conversion.convert",
    **dict.fromkeys(("Dataset", "split"), "recbole_pos.referee.split"),
    "Result": "recbole_pos.experiment.folder",
    "Callback": "recbole_pos.experiment.callbacks",
    **dict.fromkeys(("fit", "load"), "recbole_pos.serve.fit"),
    "export": "recbole_pos.serve.export",
    "recommend": "recbole_pos.serve.recommend",
    "Recommender": "recbole_pos.serve.recommender",
    **dict.fromkeys(("AttentionPosition", "InputPosition"), "recbole_pos.layers.hooks"),
    "SequenceBatch": "recbole_pos.layers.sequence_batch",
    "PosRecommender": "recbole_pos.model.base",
    "register_metric": "recbole_pos.config.metrics",
    "register_model": "recbole_pos.model.models",
    "register_scheme": "recbole_pos.position.schemes",
    "tune": "recbole_pos.tuning",
    "compare": "recbole_pos.study.comparing",
    "score": "recbole_pos.study.scoring",
    "audit": "recbole_pos.referee.audit",
}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    """Return a public name, whose module is imported on its first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module 'recbole_pos' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
