"""Process groups, the launcher and the watchdog."""
