"""What a training will cost, before it starts."""
