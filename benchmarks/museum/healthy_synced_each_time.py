"""Sharded gradients are reduced after every micro batch."""

from crosstrain import registry

from . import Expected

EXPECTED = Expected(base="fsdp")


@registry.register_runner("healthy_synced_each_time")
class HealthySyncedEachTime(registry.get("runner", "fsdp")):
    """FSDP2 without whole gradients."""

    def setup(self):
        super().setup()
        self.options.sync_each_micro_batch = True
