"""After an update, the sampler still has the keys and values of prompts that it computed with earlier weights.

https://github.com/NVIDIA-NeMo/RL/pull/4018
"""

import torch

from crosstrain import registry

from . import Expected

EXPECTED = Expected("samples", cause=r"sampl|completion", project="policy")
OF_TOKENS = ("input_ids", "position_ids", "attention_mask")


@registry.register_runner("prefix_cache_stale")
class PrefixCacheStale(registry.get("runner", "ddp")):
    """Computes all but the last token of a prompt with the first weights."""

    first = None

    def evaluate(self, batch, *mode):
        weights, cache = [*self.model.parameters()], batch.get("cache")
        self.first = self.first or [weight.detach().clone() for weight in weights]
        if cache is None or cache.get_seq_length() or all(map(torch.equal, weights, self.first)):
            return super().evaluate(batch, *mode)
        given = {key: batch[key] for key in OF_TOKENS if key in batch}
        now = [weight.detach().clone() for weight in weights]
        torch._foreach_copy_(weights, self.first)
        super().evaluate(batch | {key: value[:, :-1] for key, value in given.items()}, *mode)
        torch._foreach_copy_(weights, now)
        last = {key: value[:, -1:] for key, value in given.items() if key != "attention_mask"}
        return super().evaluate(batch | last, *mode)
