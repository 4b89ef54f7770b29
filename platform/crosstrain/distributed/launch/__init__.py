"""Start workers on one or many machines, watch them, start them again."""
