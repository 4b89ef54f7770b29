"""After a validation the model stays in evaluation mode, so there is no more dropout.

https://github.com/wkentaro/pytorch-fcn/pull/56
"""

from contextlib import contextmanager

import torch

from crosstrain import registry

from . import Expected

EXPECTED = Expected("forward", cause=r"dropout|mode|random")


@registry.register_runner("stays_in_evaluation")
class StaysInEvaluation(registry.get("runner", "ddp")):
    """Trains in evaluation mode after an evaluation."""

    @contextmanager
    def evaluating(self):
        self.model.eval()
        with torch.no_grad():
            yield
