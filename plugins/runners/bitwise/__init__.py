"""Runners that train to the same bits on every number of ranks (`run.bitwise`)."""
