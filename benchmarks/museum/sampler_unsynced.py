"""After an update, the sampler keeps the weights that it had before.

https://github.com/huggingface/trl/issues/5312
"""

import torch

from crosstrain import registry

from . import Expected

EXPECTED = Expected("samples", cause=r"sampl|completion", project="policy")


@registry.register_runner("sampler_unsynced")
class SamplerUnsynced(registry.get("runner", "ddp")):
    """Samples with the first weights."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        first, begin_step = [], self.objective.begin_step

        @torch.no_grad()
        def begin(step, policy):
            now = [p.detach().clone() for p in model.parameters()]
            first[:] = first or now
            torch._foreach_copy_(list(model.parameters()), first)
            begun = begin_step(step, policy)
            torch._foreach_copy_(list(model.parameters()), now)
            return begun

        self.objective.begin_step = begin
