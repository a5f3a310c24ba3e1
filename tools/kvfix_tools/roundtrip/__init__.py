"""The command `kvfix roundtrip`: copy KV to the host and back, and check every byte. See docs/roundtrip.md."""
