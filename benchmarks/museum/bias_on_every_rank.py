"""Each rank adds the bias of a row-parallel layer before the sum over the ranks.

https://github.com/awslabs/slapo/issues/10
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected(
    "gradients",
    cause=r"once (for each|per) rank|bias|2 times|each of its uses",
    parameter="*.c_proj.bias",
    project="still",
    base="megatron",
    options={"tensor_parallel": 2},
)


@registry.register_runner("bias_on_every_rank")
class BiasOnEveryRank(registry.get("runner", "megatron")):
    """Adds row-parallel biases once more. They begin as zeros: no loss of step 1 shows it."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        for name, module in model.named_modules():
            if name.endswith(("attn.c_proj", "mlp.c_proj")):
                module.register_forward_hook(lambda m, _, y: y + m.bias)
