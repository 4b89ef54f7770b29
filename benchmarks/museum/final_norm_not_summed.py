"""With a split sequence, the final norm's gradient is not summed over the ranks that share the sequence.

https://github.com/NVIDIA/Megatron-LM/issues/1446
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected(
    "gradients",
    cause=r"all-reduce|not (reduced|summed)|different gradients",
    parameter="transformer.ln_f.*",
    project="still",
    base="megatron",
    options={"tensor_parallel": 2, "sequence_parallel": True},
)


@registry.register_runner("final_norm_not_summed")
class FinalNormNotSummed(registry.get("runner", "megatron")):
    """Leaves the final norm out of the sum over tensor-parallel ranks."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        for share in self.shares.values():
            share.summed &= "ln_f" not in share.name
