"""The lab's engine: vLLM's real scheduler, a simulated model, and memory whose contents the lab can check."""
