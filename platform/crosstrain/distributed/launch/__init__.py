"""Start workers on one or many machines, monitor them, and restart them."""
