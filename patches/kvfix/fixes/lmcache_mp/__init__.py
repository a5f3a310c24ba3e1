"""LMCache's multi-process connectors, and vLLM's copy of one."""
