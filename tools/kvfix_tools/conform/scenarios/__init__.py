"""The scenarios of the contract."""
