"""SHA-256 digests of a checkpoint's weights and optimizer state, which do not depend on the number of ranks."""

import hashlib
import os
import re
from pathlib import Path
from typing import Any

import torch

from crosstrain.checkpoint.boxes import CALLBACK, RUNNER
from crosstrain.checkpoint.files import Reader
from crosstrain.checkpoint.manifest import STATE, STORED_DTYPES, read_json

_DIGEST = re.compile("[0-9a-f]{64}")


def digests(reader: Reader) -> dict[str, str]:
    """Return the digests of "weights" and "moments", each over whole tensors with their names, sorted by kind and name.

    "moments" covers all optimizer state. Tensors of callbacks and of the runner are left out.
    """
    found = {"weights": hashlib.sha256(), "moments": hashlib.sha256()}
    for kind, name in sorted(reader.tensors):
        if kind.startswith((CALLBACK, RUNNER)):
            continue
        value = reader.whole(name, kind, STORED_DTYPES[reader.tensors[kind, name].dtype])
        digest = found["weights" if kind == "param" else "moments"]
        digest.update(f"{kind} {name} {[*value.shape]}".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data)
    return {name: digest.hexdigest() for name, digest in found.items()}


def conditions(device: torch.device) -> dict[str, str | int]:
    """Return the conditions under which the same computation on this kind of device gives the same bits."""
    return {
        "torch": torch.__version__,
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "precision of matmuls": torch.get_float32_matmul_precision(),  # on CPUs, it selects oneDNN or MKL
        "GPU": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        "threads per rank": torch.get_num_threads(),
    }


def recorded(checkpoint: Path) -> dict[str, Any]:
    """Return the digests of a bitwise run's checkpoint, and its `conditions`; {} for any other folder.

    Raises CheckpointError if state.json is damaged.
    """
    state = read_json(checkpoint / STATE, most_bytes=1 << 24) if os.path.lexists(checkpoint / STATE) else {}
    match state:
        case {"bitwise": {"weights": str(weights), "moments": str(moments), "conditions": {}} as found}:
            return found if _DIGEST.fullmatch(weights) and _DIGEST.fullmatch(moments) else {}
    return {}
