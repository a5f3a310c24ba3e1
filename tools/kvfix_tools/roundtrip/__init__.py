"""The round trip: copy KV to the host and back, and check every byte. See docs/roundtrip.md. It needs only torch."""
