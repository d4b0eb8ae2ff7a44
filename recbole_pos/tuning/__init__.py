"""Hyperparameter search with Ray Tune: ``recbole-pos tune``, and :func:`tune` from Python.

A search is a study of one row, whose trials Ray Tune runs and may stop early.

Not called ``tune``: a package of that name would take the place of the function.
"""

from recbole_pos.tuning.tuning import Found, search
from recbole_pos.tuning.tuning import search as tune

__all__ = ["Found", "search", "tune"]
