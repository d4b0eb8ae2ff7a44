"""Building blocks that know nothing of RecBole."""
