"""One file, one bug. See CONTRIBUTING.md for how to add one."""
