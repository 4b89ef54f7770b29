"""One page about one or several runs."""
