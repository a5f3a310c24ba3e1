"""`kvfix verify URL`: does a running deployment answer the same with KV from the connector as without?"""
