"""The loss scale is raised before the gradients are divided by it, so in these steps the gradients are half as large.

https://github.com/deepspeedai/DeepSpeed/pull/8588
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("norm", cause=r"scale|0\.5|half", steps=8)


@registry.register_runner("divided_by_next_scale")
class DividedByNextScale(registry.get("runner", "ddp")):
    """Halves the gradients of every fourth step."""

    step = 0

    def optimizer_step(self, apply=True):
        self.step += 1
        if self.step % 4 == 0:
            for p in self.model.parameters():
                p.grad /= 2
        return super().optimizer_step(apply)
