"""Training steps of nanoGPT's model and optimizer, from a checkout of nanoGPT, in the loop of its bench.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def train(
    checkout: Path, sizes: dict[str, int], batches: Iterable[Any], device: str, precision: str, compiled: bool,
    after_step: Callable[[], None],
) -> None:  # fmt: skip
    """Train without dropout.

    sizes: of `GPTConfig`. batches: tokens, [rows, block_size + 1]. after_step: called once a step's loss is known.
    """
    import torch

    sys.path.insert(0, str(checkout))
    from model import GPT, GPTConfig  # nanoGPT's

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model = GPT(GPTConfig(bias=True, dropout=0.0, **sizes)).to(device)
    optimizer = model.configure_optimizers(0.1, 1e-4, (0.9, 0.95), device)
    trained = torch.compile(model) if compiled else model
    for tokens in batches:
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            _, loss = trained(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        after_step()
