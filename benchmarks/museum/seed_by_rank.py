"""Each rank shuffles with its own seed before it takes its share: some samples repeat and others are missing.

https://github.com/NVlabs/LongLive/issues/71
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("samples", cause=r"sample|data|order|shuffl")


@registry.register_runner("seed_by_rank")
class SeedByRank(registry.get("runner", "ddp")):
    """Shuffles in a different order on each rank, with the same sample numbers."""

    def loaded(self):
        super().loaded()
        self.run.seed += self.world.rank
