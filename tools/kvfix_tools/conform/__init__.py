"""`kvfix conform` tests a KV connector against vLLM's connector interface, with the real scheduler and real tensors."""
