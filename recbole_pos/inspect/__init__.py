"""Looking inside a run: arrays in ``attention``, ``kernel``, ``distance`` and ``periods``; pictures
of them in ``plot`` and ``figures``; ``report`` is ``recbole-pos inspect attention``.

``commands`` is the command line.
"""
