"""The Python interface: what the verbs of the command line do, as functions."""
