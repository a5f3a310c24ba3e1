"""The scenarios. Each file has the scenarios of one family."""
