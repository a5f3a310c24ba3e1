"""What only maintainers run. Not in the wheel."""
