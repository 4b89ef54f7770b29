"""The gradient norm is computed from the fp32 norms of the tensors."""

import torch

from crosstrain import registry

from . import Expected

EXPECTED = Expected()


@registry.register_runner("healthy_norm_in_fp32")
class HealthyNormInFp32(registry.get("runner", "ddp")):
    """Takes the norm as torch does."""

    def gradient_norm(self, gradients):
        return torch.nn.utils.get_total_norm(gradients).item()
