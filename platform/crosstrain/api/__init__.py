"""The Python interface: the verbs of the command line as functions."""
