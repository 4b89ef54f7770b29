"""The learner's log-probabilities are those at temperature 1, whatever the sampler's temperature is.

https://github.com/huggingface/trl/issues/4159
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("forward", cause=r"temperature|objective|loss", project="policy")


@registry.register_runner("temperature_ignored")
class TemperatureIgnored(registry.get("runner", "ddp")):
    """Computes plain token losses."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        self.objective.token_losses = None
