"""Types and constants that models and data share."""

import numpy as np
import torch

IGNORE_INDEX = -100  # a label that is no target, as in torch's cross_entropy
Sample = dict[str, np.ndarray]
Batch = dict[str, torch.Tensor]
