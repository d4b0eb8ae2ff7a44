"""Hyperparameter search with Ray Tune: ``recbole-pos tune``, and :func:`tune` from Python.

A search is a study of one configuration, whose trials Ray Tune runs and may stop early.

The package is not called ``tune``, which is the name of the function.
"""

from recbole_pos.tuning.tuning import SearchResult, tune

__all__ = ["SearchResult", "tune"]
