"""BLIP-2 with a causal language model; `options` has the YAML keys, and `model` has the model class."""
