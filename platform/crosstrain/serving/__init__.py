"""A model behind an HTTP interface."""
