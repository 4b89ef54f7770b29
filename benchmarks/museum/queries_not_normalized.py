"""The norms of queries and keys are built, as the configuration says, but never called.

https://github.com/Cerebras/modelzoo/pull/85
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("forward", cause=r"output of \S*[qk]_norm", project="experts")


@registry.register_runner("queries_not_normalized")
class QueriesNotNormalized(registry.get("runner", "ddp")):
    """Replaces the output of these norms with their input."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        for block in model.blocks():
            for norm in (block.self_attn.q_norm, block.self_attn.k_norm):
                norm.register_forward_hook(lambda _, inputs, output: inputs[0] + 0 * output)
