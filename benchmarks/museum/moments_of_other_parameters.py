"""Optimizer state is stored in the order of the parameters; if the order changes, parameters get wrong moments.

https://github.com/pytorch/pytorch/issues/1489
"""

from crosstrain import registry

from . import Expected, resumed

EXPECTED = Expected("resume", cause=r"moment|optimizer|exp_avg|state", parameter="transformer.h.*")


@registry.register_runner("moments_of_other_parameters")
class MomentsOfOtherParameters(registry.get("runner", "ddp")):
    """Swaps the moments of the two blocks."""

    def loaded(self):
        super().loaded()
        one, other = (list(block.parameters()) for block in self.model.blocks())
        for p, q in zip(one, other, strict=True) if resumed(self) else ():
            self.optimizer.state[p], self.optimizer.state[q] = self.optimizer.state[q], self.optimizer.state[p]
