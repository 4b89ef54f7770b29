"""Weight decay is computed in a dtype that rounds it away.

https://github.com/Nerogar/OneTrainer/issues/996
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("update", cause=r"decay", parameter="*[encj].weight")  # matrices: wte, wpe, c_attn, c_fc, c_proj


@registry.register_runner("decay_lost")
class DecayLost(registry.get("runner", "ddp")):
    """Decays nothing."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.0
