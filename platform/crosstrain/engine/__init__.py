"""Everything that computes a training step: the runner, the optimizer, mixed precision and the gradient norm."""
