"""Under expert parallelism, the router also gets gradients for slots of tokens whose experts are on other ranks.

https://github.com/huggingface/transformers/issues/48687
"""

from functools import partial

from crosstrain import registry

from . import Expected

EXPECTED = Expected("gradients", cause=r"router|slot|backward", project="experts")


@registry.register_runner("unrouted_slots")
class UnroutedSlots(registry.get("runner", "ddp")):
    """Adds other experts' outputs with weights that are zero but have gradients."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        for experts in model.structure.experts().values():
            experts.forward = partial(self.with_slots, experts.forward, experts.num_experts)

    @staticmethod
    def with_slots(forward, count, states, chosen, weights):
        others = forward(states, (chosen + 1) % count, weights - weights.detach())
        return forward(states, chosen, weights) + others
