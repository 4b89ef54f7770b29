"""Models: the base classes, Hugging Face causal models, the loss, initialization on the meta device."""
