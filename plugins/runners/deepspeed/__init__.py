"""DeepSpeed's ZeRO as a runner: `options` are what YAML may say, `partition` what a rank holds, `runner` the rest."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or it warns, on every rank, that it found nothing else
