"""Each rank clips by the norm of its own shards.

https://github.com/areal-project/AReaL/issues/312
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("norm", cause=r"norm", base="fsdp")


@registry.register_runner("norm_of_own_shard")
class NormOfOwnShard(registry.get("runner", "fsdp")):
    """Takes the norm over this rank's part of the gradients."""

    def gradient_norm(self, gradients):
        return super().gradient_norm([g.to_local() for g in gradients])
