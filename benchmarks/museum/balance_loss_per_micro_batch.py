"""The balance loss of a mixture of experts is added for each micro batch, and not divided by their number.

https://github.com/NVIDIA-NeMo/Automodel/pull/3359
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("gradients", cause=r"balanc|auxiliary|router loss|micro batch", project="experts")


@registry.register_runner("balance_loss_per_micro_batch")
class BalanceLossPerMicroBatch(registry.get("runner", "ddp")):
    """Multiplies the balance loss's gradient by the number of micro batches."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        self.balance_loss, model.routers.loss = model.routers.loss, self.undivided

    def undivided(self, labels, documents):
        loss = self.balance_loss(labels, documents)
        return loss + (self.count - 1) * (loss - loss.detach())

    def forward_backward(self, micro_batches, num_targets):
        self.count = len(micro_batches)
        return super().forward_backward(micro_batches, num_targets)
