"""The copy of a tied weight on the last pipeline stage also counts in the global norm.

https://github.com/NVIDIA/Megatron-LM/pull/7227
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected(
    "norm",
    cause=r"norm.*(twice|tied|copies)|(tied|twice).*norm",
    project="still",
    base="megatron",
    options={"pipeline_parallel": 2},
)


@registry.register_runner("norm_of_tied_twice")
class NormOfTiedTwice(registry.get("runner", "megatron")):
    """Counts a tied weight once for each of its stages."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        for share in self.shares.values():
            share.norm_weight = 1.0
