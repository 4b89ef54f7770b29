"""Loading restores Adam's moments but not its step count, so the bias correction restarts.

https://github.com/deepspeedai/DeepSpeed/pull/564
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("resume", cause=r"step|bias correction|optimizer")


@registry.register_runner("step_forgotten")
class StepForgotten(registry.get("runner", "ddp")):
    """Sets the count of steps to zero."""

    def loaded(self):
        super().loaded()
        for state in self.optimizer.state.values():
            state["step"].zero_()
