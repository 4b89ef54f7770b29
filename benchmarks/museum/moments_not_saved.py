"""Only buffers of one optimizer's kind are saved: Adam's moments and its count of steps are lost without a word.

https://github.com/TrenTorch/TrenTorch/pull/187
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("state", cause=r"lack|not saved|missing|held_state")


@registry.register_runner("moments_not_saved")
class MomentsNotSaved(registry.get("runner", "ddp")):
    """Reports no optimizer state."""

    def held_state(self, parameter):
        return {}
