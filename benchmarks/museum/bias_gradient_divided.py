"""Row-parallel biases, and with them their gradients, are divided by the number of ranks in the forward.

https://github.com/pytorch/torchtitan/pull/4332
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected(
    "gradients",
    cause=r"divided|0\.5 times|half|once more",
    parameter="*.c_proj.bias",
    project="still",
    base="megatron",
    options={"tensor_parallel": 2},
)


@registry.register_runner("bias_gradient_divided")
class BiasGradientDivided(registry.get("runner", "megatron")):
    """Divides gradients of row-parallel biases by the tensor-parallel ranks."""

    def forward_backward(self, micro_batches, num_targets):
        loss = super().forward_backward(micro_batches, num_targets)
        for share in self.shares.values():
            if share.name.endswith("c_proj.bias"):
                share.owned.grad /= self.tensor.size
        return loss
