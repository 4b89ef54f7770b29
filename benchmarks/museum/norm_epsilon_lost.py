"""A kernel of RMSNorm has a fixed epsilon of 1e-5, although the model's configuration says 1e-6.

https://github.com/paiml/aprender/pull/1606
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("forward", cause=r"output of \S*norm", project="qwen")


@registry.register_runner("norm_epsilon_lost")
class NormEpsilonLost(registry.get("runner", "ddp")):
    """Sets the epsilon of all norms."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = 1e-5
