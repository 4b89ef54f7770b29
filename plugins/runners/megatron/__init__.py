"""Megatron's parallelism for unmodified models.

`options` defines the YAML keys. `plan` decides how to shard each parameter. `tensor_parallel` replaces parameters with
slices and computes with the slices; `rng_tracker` manages the RNG states of tensor-parallel ranks. `data_parallel`
reduces gradients. `pipeline` runs the stages of a model in the order that `schedules` defines. `runner` combines these
modules, and `footprint` estimates memory.
"""
