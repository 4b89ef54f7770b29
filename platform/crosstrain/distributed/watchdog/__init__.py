"""Find out which rank hangs, where, and why."""
