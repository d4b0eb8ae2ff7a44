"""Studies: rows of models and options, trained with the same seeds, and compared target by target.

``plan`` lists the runs, ``scheduler`` decides which is next, ``dispatcher`` trains them on Ray;
``ranks`` and ``statistics`` evaluate them; ``results`` is what ``result_tables``, ``charts`` and
``study_report`` show.
"""
