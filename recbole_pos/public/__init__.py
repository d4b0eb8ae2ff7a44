"""Public logs: what they are, where they come from, and their raw files as datasets."""
