"""Generate documentation from code and from the lab's results. mkdocs runs the functions in mkdocs_hook.py."""
