"""The round trip: is every byte of KV what it was? docs/roundtrip.md. It needs torch, and nothing else of kvfix."""
