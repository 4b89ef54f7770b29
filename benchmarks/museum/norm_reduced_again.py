"""Every rank has the full gradients, but their squared norm is summed over the ranks.

https://github.com/modelscope/twinkle/pull/290
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("norm", cause=r"norm.*twice|twice.*norm|(summed|counted).*ranks")


@registry.register_runner("norm_reduced_again")
class NormReducedAgain(registry.get("runner", "ddp")):
    """Sums the norm over the ranks, although all ranks have the full norm."""

    def gradient_norm(self, gradients):
        return self.dp.all_reduce_sum(super().gradient_norm(gradients) ** 2)[0] ** 0.5
