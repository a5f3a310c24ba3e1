"""Generate documentation from code and from the lab's results. mkdocs calls the module mkdocs_hook."""
