"""The lab's engine: vLLM's real scheduler, a stand-in for the model, and memory with checkable contents."""
