"""The fused matrix of queries, keys and values is split as one matrix: a rank gets queries and half of the keys.

https://github.com/hpcaitech/ColossalAI/issues/817
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected(
    "forward",
    cause=r"forward|cut|qkv|weights",
    parameter="*.attn.*",
    project="still",
    base="megatron",
    options={"tensor_parallel": 2},
)


@registry.register_runner("fused_qkv_cut_as_one")
class FusedQkvCutAsOne(registry.get("runner", "megatron")):
    """Cuts attention's input projection by columns."""

    def prepare(self, model, make_optimizer):
        heads = {"transformer.h.*.attn.num_heads": "divide"}  # otherwise the plan is rejected
        self.options.plan = {"transformer.h.*.attn.c_attn": "column"} | heads
        super().prepare(model, make_optimizer)
