"""Megatron's parallelism for unmodified models.

`options` defines the YAML keys. `plan` decides how to shard each parameter, `shard_spec` maps a slice to its place in
the full parameter, and `shard_model` replaces the parameters. `tensor_parallel` computes with slices, using
`collectives`, `vocabulary` and `rng_tracker`. `data_parallel` reduces gradients. `pipeline_stages` splits the model for
`pipeline`. `runner` combines them, and `footprint` estimates memory.
"""
