"""vLLM itself."""
