"""The scenarios of the contract, by what happens in them."""
