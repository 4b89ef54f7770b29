"""Everything that computes a training step: the runner, optimizer, precision, gradient norm."""
