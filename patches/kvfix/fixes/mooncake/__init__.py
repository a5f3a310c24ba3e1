"""MooncakeConnector of vLLM."""
