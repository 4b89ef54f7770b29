"""Every parameter has its own group in the optimizer."""

from crosstrain import registry

from . import Expected

EXPECTED = Expected()


@registry.register_runner("healthy_group_for_each")
class HealthyGroupForEach(registry.get("runner", "ddp")):
    """AdamW with many groups, in a different order."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        groups = self.optimizer.param_groups
        self.optimizer.param_groups = [group | {"params": [p]} for group in groups for p in group["params"][::-1]]
