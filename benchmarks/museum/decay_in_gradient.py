"""The weight decay of Adam is added to the gradient, so Adam divides it by the root of the second moment.

https://github.com/mapbox/robosat/pull/166
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("update", cause=r"decay", parameter="*[encj].weight")  # matrices: wte, wpe, c_attn, c_fc, c_proj


@registry.register_runner("decay_in_gradient")
class DecayInGradient(registry.get("runner", "ddp")):
    """Turns decoupled weight decay off."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        for group in self.optimizer.param_groups:
            group["decoupled_weight_decay"] = False
