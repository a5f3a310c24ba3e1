"""NixlConnector of vLLM."""
