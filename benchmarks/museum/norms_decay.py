"""Weight decay is applied to norms, after a refactoring of how their parameters are made.

https://github.com/ServiceNow/Fast-LLM/issues/542
"""

from crosstrain import registry

from . import Expected, matching

EXPECTED = Expected("update", cause=r"decay", parameter="*.ln_*")


@registry.register_runner("norms_decay")
class NormsDecay(registry.get("runner", "ddp")):
    """Lets layer norms decay."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        norms = {id(p) for p in matching(self.model, "*.ln_*").values()}
        decaying, others = self.optimizer.param_groups
        decaying["params"] += [p for p in others["params"] if id(p) in norms]
        others["params"] = [p for p in others["params"] if id(p) not in norms]
