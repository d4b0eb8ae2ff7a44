"""Looking inside a run: arrays in ``attention``, ``distance`` and ``periods``; ``plot`` draws one,
``report``, ``encoding`` and ``relations`` are ``recbole-pos inspect attention``, ``encoding`` and
``relations``; ``pictures`` is what all of them draw with.
"""
