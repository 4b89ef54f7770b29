"""Types and constants that models and data share."""

from dataclasses import dataclass

import numpy as np
import torch

IGNORE_INDEX = -100  # a label that is no target, as in torch's cross_entropy
Sample = dict[str, np.ndarray]
Batch = dict[str, torch.Tensor]


@dataclass
class MicroBatch:
    """Samples of one forward and backward."""

    first_sample: int  # number of its first sample; dropout is seeded with it
    data: Batch
    num_targets: int  # target tokens in it
    numbers: tuple[int, ...] = ()  # of its samples


class Step(list[MicroBatch]):
    """This rank's micro batches of one step, with the sample `numbers` of all ranks."""

    numbers: list[int]
