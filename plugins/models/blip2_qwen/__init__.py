"""BLIP-2 over a causal language model: `options` are its YAML keys, `model` the whole, the others its parts."""
