"""The optimizer updates the parameters one by one."""

from crosstrain import registry

from . import Expected

EXPECTED = Expected()


@registry.register_runner("healthy_loop_optimizer")
class HealthyLoopOptimizer(registry.get("runner", "ddp")):
    """AdamW as a loop."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        for group in self.optimizer.param_groups:
            group.update(fused=False, foreach=False)
