"""Looking inside a run: arrays in ``attention``, pictures of them in ``plot``."""
