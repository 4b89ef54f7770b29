"""Inference with a trained model: generation, perplexity, visual question answering, lm-eval."""
