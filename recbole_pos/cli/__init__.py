"""The command line: arguments, and what they call."""
