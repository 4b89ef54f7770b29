"""The fp32 master weights are recreated from the bf16 weights of the checkpoint.

https://github.com/TensorAuto/OpenTau/issues/185
"""

from crosstrain import registry

from . import Expected, resumed

EXPECTED = Expected("resume", cause=r"bf16|bfloat16|precision|round|weights")


@registry.register_runner("masters_rounded_at_resume")
class MastersRoundedAtResume(registry.get("runner", "ddp")):
    """Rounds the weights that a run is resumed with."""

    def loaded(self):
        super().loaded()
        for p in self.model.parameters() if resumed(self) else []:
            p.data.copy_(p.bfloat16())
