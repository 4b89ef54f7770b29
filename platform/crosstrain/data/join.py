"""Concatenate arrays whose sizes differ, such as the images of several samples."""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad


def join_padded(arrays: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate along the first dimension; in the other dimensions, smaller arrays get zeros at the end."""
    shape = [max(sizes) for sizes in zip(*(array.shape[1:] for array in arrays), strict=True)]
    missing = [[most - size for size, most in zip(array.shape[1:], shape, strict=True)] for array in arrays]
    grown = [pad(a, [n for width in reversed(m) for n in (0, width)]) for a, m in zip(arrays, missing, strict=True)]
    return torch.cat(grown)
