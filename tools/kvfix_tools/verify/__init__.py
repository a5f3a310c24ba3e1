"""`kvfix verify URL`: check that a running server answers the same with KV from the connector as without."""
