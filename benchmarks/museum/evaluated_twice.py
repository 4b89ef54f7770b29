"""The sampler repeats samples until all ranks have the same number, so the evaluation counts some of them twice.

https://github.com/pytorch/pytorch/issues/25162
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("evaluation", cause=r"evaluat.*(count|twice)")


@registry.register_runner("evaluated_twice")
class EvaluatedTwice(registry.get("runner", "ddp")):
    """Counts the first sample of each batch twice."""

    def evaluate(self, batch, *mode):
        first = {key: value[:1] for key, value in batch.items()}
        loss = super().evaluate(batch, *mode) + super().evaluate(first, *mode)
        targets, repeated = self.model.num_targets(batch), self.model.num_targets(first)
        return loss * targets / (targets + repeated)
