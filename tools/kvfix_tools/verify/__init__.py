"""`kvfix verify URL` checks that a running server gives equal answers with and without KV from the connector."""
