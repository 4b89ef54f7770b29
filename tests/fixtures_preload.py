"""What the server of tests/fixtures_ranks.py imports once for all ranks."""

import contextlib

import torch
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.utils.tensorboard  # noqa: F401
import transformers
from transformers import GPT2LMHeadModel, Qwen2ForCausalLM, Qwen3ForCausalLM  # noqa: F401

import crosstrain.training.preflight
import crosstrain.training.worker  # noqa: F401

with contextlib.suppress(ImportError):
    import deepspeed  # noqa: F401

with contextlib.suppress(ImportError):
    import webdataset  # noqa: F401

with contextlib.suppress(ImportError):
    import s3fs  # noqa: F401

transformers.logging.set_verbosity_error()
