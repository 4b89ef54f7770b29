"""Tensor-parallel ranks split the sequence outside of the matrix products."""

from crosstrain import registry

from . import Expected

EXPECTED = Expected(project="still", base="megatron", options={"tensor_parallel": 2, "sequence_parallel": True})


@registry.register_runner("healthy_split_sequence")
class HealthySplitSequence(registry.get("runner", "megatron")):
    """megatron as it is."""

    pass
