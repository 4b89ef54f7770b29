"""Inference with a trained model: opening checkpoints, chat prompts, generation, perplexity and metrics."""
