"""The validation loss is a mean of means: samples with few targets weigh as much as others.

https://github.com/pytorch/torchtitan/pull/4167
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("evaluation", cause=r"evaluat|targets|mean", project="chat")


@registry.register_runner("evaluation_of_means")
class EvaluationOfMeans(registry.get("runner", "ddp")):
    """Averages the rows' means."""

    def evaluate(self, batch, *mode):
        rows = [{key: value[row : row + 1] for key, value in batch.items()} for row in range(len(batch["input_ids"]))]
        means = [super(EvaluationOfMeans, self).evaluate(row, *mode) / self.model.num_targets(row) for row in rows]
        return sum(means) / len(means) * self.model.num_targets(batch)
