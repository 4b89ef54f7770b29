"""Megatron's parallelism over unmodified models.

`options` are what YAML may say; `plan` says how parameters are cut, `layout` where slices lie, and `cutting` cuts them;
`layers` is how modules then compute, with `collectives`, `vocabulary` and `dropout`; `ownership` and `sharded` are what
a rank updates and how gradients reach it; `stages` cuts the model into a `pipeline`; `runner` puts them together.
"""
