"""QLoRA: low-rank adapters on linear layers with frozen weights in four bits."""

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

_BLOCK = 64  # weights per scale, as in the paper
_PER_WORD = 8  # weights per 32-bit word; weights are stored and gathered as words


@registry.register_adapter("qlora")
class QLora(Lora):
    """LoRA on frozen weights in bitsandbytes' NF4 (Dettmers et al., 2023): four bits for linear layers in the blocks.

    Full weights are quantized when they are loaded, and each rank keeps its part. Scales are replicated.
    """

    @dataclass
    class Options(Lora.Options):
        """Options of lora; dora is not supported."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        if self.settings.dora:
            raise OptionError("dora", "DoRA needs unquantized weights, but qlora stores them in four bits; use lora")

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
    """Weights of a model with some parameters in four bits."""

    def quantized(self) -> "dict[str, NF4Linear]":
        return {
            self.model.weights.canonical_name(f"{name}.weight"): module
            for name, module in self.model.named_modules()
            if isinstance(module, NF4Linear)
        }

    def logical_shape(self, name: str, shape: torch.Size) -> torch.Size:
        module = self.quantized().get(name)
        return self.inner.logical_shape(name, shape) if module is None else module.shape


class NF4Linear(nn.Module):
    """A linear layer with a frozen weight in NF4; the backward computes only the input's gradient.

    weight: fp32 [elements / 8, 1], eight weights in each word; scales: fp32 [elements / 64].
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
        """Quantize the full weight (fp32, shape `self.shape`), and keep this rank's part."""
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
