"""Experts' gradients are divided by the ranks of their own group, though more ranks have contributed to them.

https://github.com/NVIDIA/Megatron-LM/pull/5956
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("gradients", cause=r"divi|summed|averag|2 times|scal", parameter="transformer.h.1.*", base="fsdp")


@registry.register_runner("divide_factor")
class DivideFactor(registry.get("runner", "fsdp")):
    """Sums the gradients of one block."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        model.blocks()[1].set_gradient_divide_factor(1.0)
        model.blocks()[1].set_force_sum_reduction_for_comms(True)  # all that gloo has
