"""`kvfix verify URL`: check that a running server gives equal answers with and without KV from the connector."""
