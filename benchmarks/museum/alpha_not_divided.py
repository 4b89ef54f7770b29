"""An adapter's output is multiplied by alpha, not by alpha / rank.

https://github.com/Blaizzy/mlx-vlm/issues/841
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("gradients", cause=r"times|scal|alpha", parameter="*.lora_B.*", project="adapter")


@registry.register_runner("alpha_not_divided")
class AlphaNotDivided(registry.get("runner", "ddp")):
    """Scales adapters too much. B begins as zeros: no loss of step 1 shows it."""

    def prepare(self, model, make_optimizer):
        for module in model.modules():
            if hasattr(module, "lora_A"):
                module.scaling["default"] *= module.r["default"]
        super().prepare(model, make_optimizer)
