"""Options: the table of what they may be, their defaults, and one configuration made of them.

``options.py`` has the table, ``sources.py`` the defaults and config files, ``checks.py`` the
checks, ``posconfig.py`` the configuration of a run. ``arguments.py`` has what a command takes
beside options, ``plugins.py`` and ``metrics.py`` what users register.
"""
