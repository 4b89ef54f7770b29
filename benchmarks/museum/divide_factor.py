"""Gradients of experts are divided by the size of the experts' own group, although more ranks have contributed to the
gradients.

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
        model.blocks()[1].set_force_sum_reduction_for_comms(True)  # gloo can only sum
