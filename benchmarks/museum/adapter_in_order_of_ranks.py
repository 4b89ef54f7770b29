"""The gradient of an expert's adapter has the memory layout of another order of its dimensions.

https://github.com/unslothai/unsloth/issues/6930
"""

from crosstrain import registry

from . import Expected, matching

EXPECTED = Expected("gradients", cause=r"places|order|layout|assembled", parameter="*.lora_B.*", project="adapter")


@registry.register_runner("adapter_in_order_of_ranks")
class AdapterInOrderOfRanks(registry.get("runner", "ddp")):
    """Reads the gradients of B as if the rank came first."""

    def forward_backward(self, micro_batches, num_targets):
        loss = super().forward_backward(micro_batches, num_targets)
        for parameter in matching(self.model, "*.lora_B.*").values():
            parameter.grad.copy_(parameter.grad.T.reshape(parameter.shape).clone())
        return loss
