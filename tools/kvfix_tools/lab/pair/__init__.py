"""Two engines in the lab: prefill and decode with a router, or two engines that share a cache."""
