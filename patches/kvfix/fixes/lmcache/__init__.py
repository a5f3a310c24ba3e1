"""LMCache in vLLM's own processes."""
