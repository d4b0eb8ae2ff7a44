"""Training runs on Ray, for ``tune`` and ``compare``: one machine or a cluster, kept and resumed.

``worker`` trains one run in a process of Ray's; ``cluster`` starts Ray or joins a cluster.
"""

DONE, FAILED = "done", "failed"  # statuses of a run that has ended
