"""A checkpoint has the position in the epoch, but not the order of its samples: a resumed run repeats some samples and
misses others.

https://github.com/huggingface/accelerate/issues/4195
"""

from crosstrain import registry

from . import Expected, resumed

EXPECTED = Expected("resume", cause=r"sample|order|data")


@registry.register_runner("order_lost_at_resume")
class OrderLostAtResume(registry.get("runner", "ddp")):
    """Shuffles anew when a run is resumed."""

    def loaded(self):
        super().loaded()
        self.run.seed += resumed(self)
