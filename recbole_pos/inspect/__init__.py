"""Looking inside a run: arrays in ``attention``, ``kernel``, ``distance`` and ``periods``; pictures
of them in ``plot`` and ``figures``; ``report``, ``encoding`` and
``relations`` are ``recbole-pos inspect attention``, ``encoding`` and ``relations``.

``commands`` is the command line.
"""
