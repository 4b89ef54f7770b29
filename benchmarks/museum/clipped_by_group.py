"""Each parameter group is clipped by its own norm, not by the norm of all gradients.

https://github.com/huggingface/transformers/issues/581
"""

from torch.nn.utils import clip_grad_norm_

from crosstrain import registry

from . import Expected

EXPECTED = Expected("update", cause=r"clip")


@registry.register_runner("clipped_by_group")
class ClippedByGroup(registry.get("runner", "ddp")):
    """Clips group by group."""

    def setup(self):
        super().setup()
        self.limit, self.run.grad_norm_clip = self.run.grad_norm_clip, None

    def update(self):
        for group in self.optimizer.param_groups:
            clip_grad_norm_(group["params"], self.limit)
        super().update()
