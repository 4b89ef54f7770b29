"""Helpers that do not depend on training: errors, logging, paths, files, units, timers."""
