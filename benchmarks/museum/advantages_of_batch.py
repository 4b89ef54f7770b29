"""Rewards are standardized over all completions of a batch, not over those of a prompt.

https://github.com/XU-YIJIE/grpo-flat/issues/2
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("forward", cause=r"advantage|only the loss", project="policy")


@registry.register_runner("advantages_of_batch")
class AdvantagesOfBatch(registry.get("runner", "ddp")):
    """Computes the advantages of a micro batch again."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        loss = self.objective.loss

        def of_batch(losses, batch):
            rewards = batch["reward"]
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            return loss(losses, batch | {"advantages": advantages})

        self.objective.loss = of_batch
