"""The connectors in the lab: the released code in both roles, and replacements for what needs a GPU or a network."""
