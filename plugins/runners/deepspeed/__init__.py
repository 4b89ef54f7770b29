"""DeepSpeed's ZeRO as a runner: YAML keys in `options`, a rank's state in `partition`, the engine in `runner`."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or it warns, on every rank, that it found nothing else
