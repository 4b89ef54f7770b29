"""Inference with a trained model: generation, perplexity, visual question answering and lm-eval tasks."""
