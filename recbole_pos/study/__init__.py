"""Studies: rows of models and options, trained with the same seeds, and compared target by target.

``plan`` and ``expand`` say what is run; ``ranks``, ``statistics``, ``components`` and
``significance`` what the runs say, ``simulation`` whether that can be trusted; ``ties`` what the
split leaves to chance; ``results`` is what ``tables``, ``charts`` and ``report`` show.
"""
