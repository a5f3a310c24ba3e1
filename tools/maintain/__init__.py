"""Commands for maintainers. They are not in the wheel."""
