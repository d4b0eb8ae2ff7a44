"""Position schemes: one class per idea, one file per family. The table is ``schemes.py``."""
