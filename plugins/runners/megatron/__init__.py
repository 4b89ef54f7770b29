"""Megatron's parallelism for unmodified models.

`options` defines the YAML keys. `plan` decides how to shard each parameter. `tensor_parallel` replaces parameters with
slices and computes with them, with random numbers from `rng_tracker`. `data_parallel` reduces gradients. `pipeline`
runs the stages of a model by `schedules`. `runner` combines them, and `footprint` estimates memory.
"""
