"""The lab's engine: vLLM's real scheduler, a model and memory whose contents can be checked."""
