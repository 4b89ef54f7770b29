"""Groups of ranks with the same weights clip by different norms, and the copies drift apart.

https://github.com/NVIDIA-NeMo/Automodel/issues/3816
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("update", cause=r"different weights|other ranks|rank 1|clip")


@registry.register_runner("clipped_on_one_rank")
class ClippedOnOneRank(registry.get("runner", "ddp")):
    """Clips ten times as much on the second rank."""

    def setup(self):
        super().setup()
        if self.world.rank == 1:
            self.run.grad_norm_clip /= 10
