"""The samples of a micro batch are computed one by one."""

from crosstrain import registry

from . import Expected

EXPECTED = Expected(project="chat")


@registry.register_runner("healthy_rows_one_by_one")
class HealthyRowsOneByOne(registry.get("runner", "ddp")):
    """Sums the losses of single samples."""

    def compute_loss(self, batch):
        rows = [{key: value[row : row + 1] for key, value in batch.items()} for row in range(len(batch["input_ids"]))]
        return sum(super(HealthyRowsOneByOne, self).compute_loss(row) for row in rows)
