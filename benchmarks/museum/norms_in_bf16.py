"""Parameters are kept in bf16, and updates of a norm's weight, about 1.0, are lost to rounding.

https://github.com/vllm-project/speculators/pull/765
"""

from crosstrain import registry

from . import Expected, matching

EXPECTED = Expected("update", cause=r"bf16|bfloat16|precision|round", parameter="*.ln_*.weight")


@registry.register_runner("norms_in_bf16")
class NormsInBf16(registry.get("runner", "ddp")):
    """Rounds the weights of layer norms after each update."""

    def update(self):
        super().update()
        for p in matching(self.model, "*.ln_*.weight").values():
            p.data.copy_(p.bfloat16())
