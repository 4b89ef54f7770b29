"""DeepSpeed's ZeRO as a runner: `options` has the YAML keys, `partition` a rank's state, `runner` the engine."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # avoids a warning on every rank
