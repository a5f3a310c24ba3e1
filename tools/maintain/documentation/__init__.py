"""The parts of the documentation that are made from the code and from the lab's results, for mkdocs (mkdocs_hook)."""
