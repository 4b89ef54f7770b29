"""Adam has one step count for all parameters, and the count advances once per parameter.

https://github.com/flashlight/flashlight/issues/143
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("update", cause=r"step|bias correction|clock|count")


@registry.register_runner("clock_of_parameters")
class ClockOfParameters(registry.get("runner", "ddp")):
    """Counts parameters as steps."""

    steps = 0

    def update(self):
        states = list(self.optimizer.state.values())
        for number, state in enumerate(states):
            state["step"].fill_(self.steps * len(states) + number)
        super().update()
        self.steps += 1
