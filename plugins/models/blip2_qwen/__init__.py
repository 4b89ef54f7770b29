"""BLIP-2 over a causal language model: `options` has the YAML keys, `model` the model, the other files its parts."""
