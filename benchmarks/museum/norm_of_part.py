"""The global norm filters tensors that it takes for copies, and so misses parts that other ranks hold.

https://github.com/NVIDIA/Megatron-LM/pull/5916
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("norm", cause=r"norm", project="still", base="megatron", options={"tensor_parallel": 2})


@registry.register_runner("norm_of_part")
class NormOfPart(registry.get("runner", "megatron")):
    """Counts the first rank's part of each MLP alone."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        for share in self.shares.values():
            if "mlp" in share.name and self.tensor.rank > 0:
                share.norm_weight = 0.0
