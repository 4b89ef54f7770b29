"""The Python interface: the `crosstrain` commands as functions."""
