"""For a sharded adapter, the checkpoint gets only the rows of the first rank.

https://github.com/huggingface/accelerate/pull/4206
"""

from functools import cached_property

from crosstrain import HeldState, registry

from . import Expected

EXPECTED = Expected(
    "state", cause=r"lack|missing|rank 1|nobody|no rank|part", parameter="*.lora_*", project="adapter", base="fsdp"
)


@registry.register_runner("adapter_of_first_rank")
class AdapterOfFirstRank(registry.get("runner", "fsdp")):
    """Reports no shards of the adapter, except on the first rank."""

    filled = False

    def loaded(self):
        super().loaded()
        self.filled = True

    @cached_property
    def held(self):
        return _FirstRanks(self)


class _FirstRanks(HeldState):
    def shards(self):
        shards = super().shards()
        for shard in shards:
            if ".lora_" in shard.name and self.runner.filled and self.runner.world.rank > 0:
                shard.pieces = []
        return shards
