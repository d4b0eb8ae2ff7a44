"""Options: the table of what they may be, their defaults, and one configuration made of them."""
