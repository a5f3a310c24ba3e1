"""Make the parts of the documentation that come from code and from the lab's results (for mkdocs: mkdocs_hook)."""
