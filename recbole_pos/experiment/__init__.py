"""One experiment: data, model and trainer made of a configuration, and what a run leaves."""
