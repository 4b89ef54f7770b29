"""The optimizer runs operation by operation over lists of tensors."""

from crosstrain import registry

from . import Expected

EXPECTED = Expected()


@registry.register_runner("healthy_foreach_optimizer")
class HealthyForeachOptimizer(registry.get("runner", "ddp")):
    """AdamW without the fused kernel."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        for group in self.optimizer.param_groups:
            group.update(fused=False, foreach=True)
