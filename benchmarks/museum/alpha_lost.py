"""The saved configuration of an adapter has an alpha of 0, so the loaded adapter has no effect.

https://github.com/verl-project/verl/issues/5325
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("export", cause=r"alpha|config", project="adapter")


@registry.register_runner("alpha_lost")
class AlphaLost(registry.get("runner", "ddp")):
    """Saves a different alpha from the one in training."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        model.export.adapter.config.lora_alpha = 0
