"""Plugins for Crosstrain. A file is imported when a project names one of its components."""
