"""Ranks shuffle by seeds of their own and take their share of different orders: samples repeat and others are missing.

https://github.com/NVlabs/LongLive/issues/71
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("samples", cause=r"sample|data|order|shuffl")


@registry.register_runner("seed_by_rank")
class SeedByRank(registry.get("runner", "ddp")):
    """Shuffles in another order on each rank, under the same numbers of samples."""

    def loaded(self):
        super().loaded()
        self.run.seed += self.world.rank
