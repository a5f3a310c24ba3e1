"""OffloadingConnector and SimpleCPUOffloadConnector of vLLM."""
