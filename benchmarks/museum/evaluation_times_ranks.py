"""A factor that undoes the average over ranks in training is also applied to the evaluation loss.

https://github.com/huggingface/transformers/issues/35078
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("evaluation", cause=r"evaluat|times|ranks")


@registry.register_runner("evaluation_times_ranks")
class EvaluationTimesRanks(registry.get("runner", "ddp")):
    """Multiplies losses of evaluations by the ranks."""

    def evaluate(self, batch, *mode):
        return super().evaluate(batch, *mode) * self.dp.size
