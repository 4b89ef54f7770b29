"""The first and the last stage hold copies of a tied weight, and each updates its copy with only its own gradient.

https://github.com/uw-syfi/piper/issues/13
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected(
    "gradients",
    cause=r"tied|stage|all-reduce",
    parameter="transformer.wte.weight",
    project="still",
    base="megatron",
    options={"pipeline_parallel": 2},
)


@registry.register_runner("tied_not_summed")
class TiedNotSummed(registry.get("runner", "megatron")):
    """Does not sum the gradients of a tied weight over its stages."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        self.tied = []
