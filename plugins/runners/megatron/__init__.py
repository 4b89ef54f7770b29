"""Megatron's parallelism over unmodified models.

`options` holds the YAML keys. `plan` decides how each parameter is cut, `shard_spec` maps slices to the whole, and
`shard_model` cuts the model. `tensor_parallel` computes with slices, helped by `collectives`, `vocabulary` and
`rng_tracker`. `data_parallel` reduces gradients. `pipeline_stages` splits the model for `pipeline`. `runner` puts them
together, and `footprint` estimates their memory.
"""
