"""A forward begins before updated weights are gathered, and computes with the weights of the previous step.

https://github.com/NVIDIA/Megatron-LM/issues/950
"""

from crosstrain import registry

from . import Expected, matching

EXPECTED = Expected("forward", cause=r"stale|old|previous|weights|step 2")


@registry.register_runner("weights_of_last_step")
class WeightsOfLastStep(registry.get("runner", "ddp")):
    """Trains with the previous weights of one MLP."""

    previous = None

    def forward_backward(self, micro_batches, num_targets):
        mlp = matching(self.model, "transformer.h.1.mlp.*")
        current = {name: p.detach().clone() for name, p in mlp.items()}
        for name, p in mlp.items():
            p.data.copy_((self.previous or current)[name])
        loss = super().forward_backward(micro_batches, num_targets)
        for name, p in mlp.items():
            p.data.copy_(current[name])
        self.previous = current
        return loss
