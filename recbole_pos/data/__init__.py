"""Data: the interactions once, and windows over them."""
