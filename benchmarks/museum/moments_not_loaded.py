"""The optimizer's state is saved and never read.

https://github.com/NVIDIA-NeMo/Automodel/issues/763
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("resume", cause=r"moment|optimizer|state")


@registry.register_runner("moments_not_loaded")
class MomentsNotLoaded(registry.get("runner", "ddp")):
    """Discards the loaded optimizer state."""

    def loaded(self):
        super().loaded()
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
