"""After a resume, the first step uses the weight decay of the arguments, not the one restored from the checkpoint.

https://github.com/NVIDIA/Megatron-LM/pull/7468
"""

from crosstrain import registry

from . import Expected, resumed

EXPECTED = Expected("resume", cause=r"decay", parameter="*[encj].weight")  # matrices: wte, wpe, c_attn, c_fc, c_proj


@registry.register_runner("decay_stale_at_resume")
class DecayStaleAtResume(registry.get("runner", "ddp")):
    """Halves the weight decay of one update."""

    stale = False

    def loaded(self):
        super().loaded()
        self.stale = resumed(self)

    def update(self):
        factor, self.stale = 0.5 if self.stale else 1.0, False
        for group in self.optimizer.param_groups:
            group["weight_decay"] *= factor
        super().update()
        for group in self.optimizer.param_groups:
            group["weight_decay"] /= factor
