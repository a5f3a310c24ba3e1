"""The lab's connectors run released code in both roles, with replacements for code that needs a GPU or a network."""
