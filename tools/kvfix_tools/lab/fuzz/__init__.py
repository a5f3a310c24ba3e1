"""Random schedules: draw them from a seed, play them and shrink them."""
