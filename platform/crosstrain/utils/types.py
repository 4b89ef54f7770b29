"""Types that models and data share."""

from __future__ import annotations

import numpy as np
import torch

Sample = dict[str, np.ndarray]


Batch = dict[str, torch.Tensor]
