"""The lab's connectors. The released code runs in both roles, with replacements for code that needs GPU or network."""
