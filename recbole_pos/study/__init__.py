"""Studies: rows of models and options, trained with the same seeds, and compared target by target.

``plan`` lists the runs, ``scheduler`` decides which is next, ``dispatcher`` trains them on Ray or
in processes of this machine; ``collecting`` reads their results, ``results`` computes the numbers
of the tables by ``statistics``, and ``result_tables`` and ``study_report`` show them. ``power``
tells which difference more seeds would detect.
"""
