"""The probabilities of the router are gathered without autograd, so the router does not learn from the loss.

https://github.com/NVIDIA-NeMo/Automodel/issues/2995
"""

from crosstrain import registry

from . import Expected, matching

EXPECTED = Expected(
    "gradients", cause=r"left out|zero|lost|no gradient", parameter="*.mlp.gate.weight", project="experts"
)


@registry.register_runner("router_without_gradient")
class RouterWithoutGradient(registry.get("runner", "ddp")):
    """Sets the gradients of routers to zero."""

    def forward_backward(self, micro_batches, num_targets):
        loss = super().forward_backward(micro_batches, num_targets)
        for parameter in matching(self.model, "*.mlp.gate.weight").values():
            parameter.grad.zero_()
        return loss
