"""At stage 0, Muon is SGD with momentum: the Newton-Schulz iterations are left out.

https://github.com/deepspeedai/DeepSpeed/issues/8442
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("update", cause=r"optimizer|orthogonal", parameter="transformer.h.*.weight", project="muon")


@registry.register_runner("muon_without_iterations")
class MuonWithoutIterations(registry.get("runner", "ddp")):
    """Updates matrices with their momentum."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        self.optimizer.transform = lambda matrix, state: matrix / matrix.norm()
