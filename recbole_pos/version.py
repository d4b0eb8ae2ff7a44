"""The version of this package; ``setup.cfg`` reads it from here as text."""

__version__ = "0.2.0"
