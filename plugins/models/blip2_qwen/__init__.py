"""BLIP-2 with a causal language model; `options` defines the YAML keys, and `model` the model class."""
