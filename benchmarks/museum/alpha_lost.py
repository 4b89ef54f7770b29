"""The saved adapter's configuration has an alpha of 0, so that it does nothing where it is loaded.

https://github.com/verl-project/verl/issues/5325
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("export", cause=r"alpha|config", project="adapter")


@registry.register_runner("alpha_lost")
class AlphaLost(registry.get("runner", "ddp")):
    """Saves another scale than it trains with."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        model.export.adapter.config.lora_alpha = 0
