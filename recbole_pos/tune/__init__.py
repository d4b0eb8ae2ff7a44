"""Hyperparameter search with Ray Tune: ``recbole-pos tune``, and :func:`search` from Python.

Nothing else in the package imports Ray.
"""

from recbole_pos.tune.tuning import Found, search

__all__ = ["Found", "search"]
