"""Public datasets: their descriptions, sources, and raw files converted to datasets."""
