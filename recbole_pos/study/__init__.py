"""Studies: rows of models and options, trained with the same seeds, and compared target by target.

``plan`` and ``expand`` say what is run, ``ranks`` and ``statistics`` what the runs say, ``ties``
what the split leaves to chance; ``results`` is what ``result_tables``, ``charts`` and
``study_report`` show.
"""
