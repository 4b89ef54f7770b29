"""Plugins for Crosstrain: a file of this package is imported when a project names one of its components."""
