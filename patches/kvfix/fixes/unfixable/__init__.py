"""Bugs that cannot be fixed from outside, each with a workaround."""
