"""Training runs of ``tune`` and ``compare``, on this machine or a Ray cluster, kept and resumed.

``training_runs`` trains one run in a process, and starts such processes on this machine;
``cluster`` starts Ray or joins a cluster.
"""

DONE, FAILED = "done", "failed"  # statuses of a run that has ended
