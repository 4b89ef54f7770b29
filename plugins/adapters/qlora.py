"""QLoRA: low-rank adapters on linear maps whose frozen weights are kept in four bits."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import bitsandbytes
import torch
from bitsandbytes.functional import QuantState, get_4bit_type, quantize_4bit
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from crosstrain import Around, Box, Model, OptionError, dtensor_pieces, registry, whole_pieces

from .lora import Lora

_BLOCK = 64  # weights that share a scale, as published
_PER_WORD = 8  # weights in a 32-bit word, the type in which they are stored and gathered


@registry.register_adapter("qlora")
class QLora(Lora):
    """LoRA on weights in NF4 (Dettmers et al., 2023) by bitsandbytes: all linear maps in the blocks, at half a byte.

    Weights are quantised as they are read, before anything is sharded. Their scales are whole on every rank.
    """

    @dataclass
    class Options(Lora.Options):
        """The options of lora, dora excepted."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        if self.settings.dora:
            raise OptionError("dora", "needs whole weights, and qlora keeps them in four bits; use lora")

    def add(self, model: Model) -> None:
        super().add(model)
        for block in model.blocks():
            for parent in list(block.modules()):
                for name, module in list(parent.named_children()):
                    adapter = name.startswith("default") or isinstance(parent, NF4Linear)
                    if isinstance(module, (nn.Linear, Conv1D)) and not adapter and module.weight.numel() % _BLOCK == 0:
                        setattr(parent, name, NF4Linear(module))
        model.weights = _QuantizedWeights(model.weights)  # type: ignore[assignment]


class _QuantizedWeights(Around):
    """The weights of a model that keeps some in four bits."""

    def quantized(self) -> dict[str, NF4Linear]:
        return {
            self.model.weights.canonical_name(f"{name}.weight"): module
            for name, module in self.model.named_modules()
            if isinstance(module, NF4Linear)
        }

    def logical_shape(self, name: str, shape: torch.Size) -> torch.Size:
        module = self.quantized().get(name)
        return self.inner.logical_shape(name, shape) if module is None else module.shape


class NF4Linear(nn.Module):
    """A linear map with a frozen weight in NF4; the input's gradient alone is computed.

    weight: fp32 [elements / 8, 1], each word eight weights; scales: fp32 [elements / 64].
    """

    scales: Tensor
    code: Tensor

    def __init__(self, linear: nn.Linear | Conv1D) -> None:
        super().__init__()
        self.shape, self.transposed = linear.weight.shape, isinstance(linear, Conv1D)
        elements = prod(self.shape)
        device = linear.weight.device
        self.weight = nn.Parameter(torch.empty(elements // _PER_WORD, 1, device=device), requires_grad=False)
        self.bias = linear.bias
        self.register_buffer("scales", torch.zeros(elements // _BLOCK), persistent=False)
        self.register_buffer("code", get_4bit_type("nf4", device="cpu", blocksize=_BLOCK), persistent=False)

    def quantize(self, value: Tensor) -> None:
        """Quantise the whole weight, fp32 of `shape`, and keep this rank's part."""
        whole = (value.T if self.transposed else value).contiguous().to(self.scales.device)
        words, state = quantize_4bit(whole, blocksize=_BLOCK, quant_type="nf4", quant_storage=torch.float32)
        self.scales.copy_(state.absmax)
        held, shape = self.weight.data, tuple(words.shape)
        for piece in dtensor_pieces(held, shape) if isinstance(held, DTensor) else whole_pieces(held, shape):
            piece.data.copy_(words[piece.box.slices_in(Box.whole(shape))])

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        shape = self.shape[::-1] if self.transposed else self.shape
        state = QuantState(
            self.scales, shape=torch.Size(shape), code=self.code, blocksize=_BLOCK, quant_type="nf4", dtype=dtype
        )
        bias = None if self.bias is None else self.bias.to(dtype)
        return bitsandbytes.matmul_4bit(x.to(dtype), self.weight.t(), quant_state=state, bias=bias)
