"""Find the rank, the location and the cause of a hang."""
