"""DeepSpeed's ZeRO as a runner.

`options` defines the YAML keys, `partition` describes a rank's state, and `runner` drives DeepSpeed's engine.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # avoids a warning on every rank
