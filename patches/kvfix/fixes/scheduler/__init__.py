"""vLLM's scheduler, and MultiConnector."""
