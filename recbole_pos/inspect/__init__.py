"""Looking inside a run: arrays in ``attention_weights``, ``distance`` and ``periods``;
``run_pictures`` is ``recbole-pos plot``; ``attention_report``, ``encoding`` and ``relation_use``
are ``recbole-pos inspect``; ``pictures`` is what all of them draw with.
"""
