"""One module is what moves KV in one way, or in a few that are alike (backend.py)."""
