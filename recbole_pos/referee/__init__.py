"""Splits that leave the package, and predictions of any system that are judged on them."""
