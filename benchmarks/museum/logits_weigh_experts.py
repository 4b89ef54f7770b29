"""The outputs of experts are weighted by the router's logits, because softmax is only a part of their normalization.

https://github.com/sgl-project/sglang/pull/35160
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("forward", cause=r"output of \S*(experts|gate)", project="experts")


@registry.register_runner("logits_weigh_experts")
class LogitsWeighExperts(registry.get("runner", "ddp")):
    """Returns logits as the weights of the chosen experts."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        for block in model.blocks():
            block.mlp.gate.register_forward_hook(self.unnormalized)

    @staticmethod
    def unnormalized(_, inputs, output):
        logits, _, chosen = output
        return logits, logits.gather(1, chosen), chosen
