"""Studies: rows of models and options, trained with the same seeds, and compared target by target.

``plan`` and ``expand`` list the runs, ``ranks`` and ``statistics`` evaluate them, ``ties``
what the split leaves to chance; ``results`` is what ``result_tables``, ``charts`` and
``study_report`` show.
"""
