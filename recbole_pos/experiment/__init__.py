"""One experiment: data, model and trainer made of a configuration, and the output of a run.

Not called ``run``: a package of that name would take the place of the function ``recbole_pos.run``
as soon as anything in it is imported.
"""
