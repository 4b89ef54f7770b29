"""Stage 0 with bf16 divides gradients by the initial loss scale of fp16, although no loss was scaled.

https://github.com/deepspeedai/DeepSpeed/issues/7839
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("gradients", cause=r"scale|scaling")


@registry.register_runner("divided_by_initial_scale")
class DividedByInitialScale(registry.get("runner", "ddp")):
    """Divides gradients by 65536."""

    def forward_backward(self, micro_batches, num_targets):
        loss = super().forward_backward(micro_batches, num_targets)
        for parameter in self.model.parameters():
            parameter.grad /= 65536
        return loss
