"""SHA-256 digests of a checkpoint's weights and optimizer state, which do not depend on the number of ranks."""

import hashlib

import torch

from crosstrain.checkpoint.boxes import CALLBACK, RUNNER, Shard, whole_pieces
from crosstrain.checkpoint.files import Reader
from crosstrain.checkpoint.manifest import DTYPES

_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def digests(reader: Reader) -> dict[str, str]:
    """Return the digests of "weights" and of "moments": names and values of whole tensors, in order of their names.

    Moments are all optimizer state. Tensors of callbacks and of the runner are left out.
    """
    found = {"weights": hashlib.sha256(), "moments": hashlib.sha256()}
    for kind, name in sorted(reader.tensors):
        if kind.startswith((CALLBACK, RUNNER)):
            continue
        stored = reader.tensors[kind, name]
        value = torch.empty(stored.shape, dtype=_DTYPES[stored.dtype])
        reader.fill([Shard(kind, name, tuple(value.shape), whole_pieces(value, tuple(value.shape)))])
        digest = found["weights" if kind == "param" else "moments"]
        digest.update(f"{kind} {name} {[*value.shape]}".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data)
    return {name: digest.hexdigest() for name, digest in found.items()}
