"""Draw, play and shrink random schedules. A seed determines a schedule."""
