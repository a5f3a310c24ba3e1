"""Bugs that kvfix cannot fix from outside vLLM and LMCache, each with a workaround."""
