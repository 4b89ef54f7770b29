"""BLIP-2 with a causal language model: `options` has the YAML keys, `model` the model, the other files its parts."""
