"""Helpers that know nothing of training: errors, logging, paths, files, units, timers."""
