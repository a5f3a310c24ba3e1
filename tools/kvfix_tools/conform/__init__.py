"""`kvfix conform`: does a KV connector keep what vLLM expects of one? On the real scheduler, with real tensors."""
