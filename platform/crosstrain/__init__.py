"""Crosstrain: train the model that a YAML file names with the runner that the file names."""

__version__ = "0.1.0"
