"""`kvfix conform`: test a KV connector against vLLM's connector interface, on the real scheduler, with real tensors."""
