"""Types and constants that models and data share."""

from dataclasses import dataclass

import numpy as np
import torch

IGNORE_INDEX = -100  # label of positions without a target, as in torch's cross_entropy
Sample = dict[str, np.ndarray]
Batch = dict[str, torch.Tensor]


@dataclass
class MicroBatch:
    """The samples of one forward and backward pass."""

    first_sample: int  # number of the first sample; seeds dropout
    data: Batch
    num_targets: int  # number of target tokens, or of the objective's targets
    numbers: tuple[int, ...] = ()  # sample numbers


class Step(list[MicroBatch]):
    """This rank's micro batches of one step; `numbers` contains the sample numbers of the step on all ranks."""

    numbers: list[int]
    use: int = 0  # number of earlier steps with the same samples
