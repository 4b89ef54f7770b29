"""Only the buffers of a different optimizer are saved: Adam's moments and step count are silently lost.

https://github.com/TrenTorch/TrenTorch/pull/187
"""

from functools import cached_property

from crosstrain import HeldState, registry

from . import Expected

EXPECTED = Expected("state", cause=r"lack|not saved|missing|held[.]state")


@registry.register_runner("moments_not_saved")
class MomentsNotSaved(registry.get("runner", "ddp")):
    """Reports no optimizer state."""

    @cached_property
    def held(self):
        return _NoState(self)


class _NoState(HeldState):
    def state(self, parameter):
        return {}
