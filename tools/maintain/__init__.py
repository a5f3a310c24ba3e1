"""Programs for maintainers. The wheel does not contain these programs."""
