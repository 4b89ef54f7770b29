"""Under expert parallelism, each rank keeps the gradient of the router from its own samples.

https://github.com/huggingface/transformers/pull/48205
"""

from crosstrain import registry

from . import Expected, matching

EXPECTED = Expected("gradients", cause=r"all-reduce|rank|own", parameter="*.mlp.gate.weight", project="experts")


@registry.register_runner("router_of_own_rank")
class RouterOfOwnRank(registry.get("runner", "ddp")):
    """Puts local sums in place of the routers' reduced gradients."""

    def forward_backward(self, micro_batches, num_targets):
        routers, sums = matching(self.model, "*.mlp.gate.weight"), {}

        def add(name, gradient):
            sums[name] = sums.get(name, 0.0) + gradient

        hooks = [p.register_hook(lambda g, name=name: add(name, g)) for name, p in routers.items()]
        loss = super().forward_backward(micro_batches, num_targets)
        for hook in hooks:
            hook.remove()
        for name, parameter in routers.items():
            parameter.grad.copy_(sums[name])
        return loss
