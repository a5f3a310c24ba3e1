"""The scenarios of the lab. Each file has related scenarios."""
