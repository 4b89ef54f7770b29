"""The optimizer was built before modules were replaced, and updates parameters that are no longer used.

https://github.com/deepspeedai/DeepSpeed/pull/8354
"""

from crosstrain import registry

from . import Expected, matching

EXPECTED = Expected("update", cause=r"not updated|leaves? out|group|never", parameter="transformer.h.1.mlp.*")


@registry.register_runner("never_updated")
class NeverUpdated(registry.get("runner", "ddp")):
    """Leaves one MLP as it was."""

    def update(self):
        kept = {p: p.detach().clone() for p in matching(self.model, "transformer.h.1.mlp.*").values()}
        super().update()
        for p, before in kept.items():
            p.data.copy_(before)
