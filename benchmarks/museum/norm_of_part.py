"""The global norm leaves out tensors that are mistaken for copies, so the parts on other ranks are missing.

https://github.com/NVIDIA/Megatron-LM/pull/5916
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("norm", cause=r"norm", project="still", base="megatron", options={"tensor_parallel": 2})


@registry.register_runner("norm_of_part")
class NormOfPart(registry.get("runner", "megatron")):
    """Counts only the first rank's part of each MLP."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        for share in self.shares.values():
            if "mlp" in share.name and self.tensor.rank > 0:
                share.norm_weight = 0.0
