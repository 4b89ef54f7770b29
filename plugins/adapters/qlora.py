"""QLoRA: low-rank adapters on layers and experts with frozen weights in four bits."""

from dataclasses import dataclass
from typing import Any

import bitsandbytes
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, get_4bit_type, quantize_4bit
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from crosstrain import Around, Box, ConfigError, Model, OptionError, dtensor_pieces, registry, whole_pieces

from .lora import Lora
from .stacked import Stacked, innermost, matrices_of

_BLOCK = 64  # weights per scale, as in the paper
_PER_WORD = 8  # weights per 32-bit word; weights are stored and gathered as words


@registry.register_adapter("qlora")
class QLora(Lora):
    """LoRA on frozen weights in bitsandbytes' NF4 (Dettmers et al., 2023): four bits for linear layers and experts.

    Full weights in the blocks are quantized when they are loaded, and each rank keeps its part. Scales are replicated.
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
        experts = model.structure.experts().values()
        for block in model.blocks():
            for parent in list(block.modules()):
                for name, module in list(parent.named_children()):
                    adapter = name.startswith("default") or isinstance(parent, NF4Linear)
                    if isinstance(module, (nn.Linear, Conv1D)) and not adapter and module.weight.numel() % _BLOCK == 0:
                        setattr(parent, name, NF4Linear(module))
                    elif module in experts:
                        setattr(parent, name, _in_four_bits(module))
                    elif matrices_of(module) and not isinstance(module, nn.Conv1d):
                        raise ConfigError(
                            f"model.adapter: qlora cannot store {type(module).__name__} in four bits; use lora"
                        )
        model.weights = _QuantizedWeights(model.weights)  # type: ignore[assignment]


class _QuantizedWeights(Around):
    """Weights of a model with some parameters in four bits."""

    def quantized(self) -> "dict[str, NF4]":
        return {
            self.model.weights.canonical_name(f"{path.removesuffix('nf4')}{module.name}"): module
            for path, module in self.model.named_modules()
            if isinstance(module, NF4)
        }

    def logical_shape(self, name: str, shape: torch.Size) -> torch.Size:
        found = self.quantized().get(name)
        return self.inner.logical_shape(name, shape) if found is None else found.shape


class NF4(nn.Module):
    """The scales of a frozen weight in NF4: fp32 [elements / 64].

    The parameter `name` of `owner` holds the weight: fp32 [elements / 8, 1], eight weights in each word.
    """

    scales: Tensor
    code: Tensor

    def __init__(self, owner: nn.Module, name: str, transposed: bool = False) -> None:
        super().__init__()
        weight = owner.get_parameter(name)
        self.shape, self.transposed, self.name = weight.shape, transposed, name
        self.register_buffer("scales", torch.zeros(weight.numel() // _BLOCK), persistent=False)
        self.register_buffer("code", get_4bit_type("nf4", device="cpu", blocksize=_BLOCK), persistent=False)
        words = torch.empty(weight.numel() // _PER_WORD, 1, device=weight.device)
        owner.register_parameter(name, nn.Parameter(words, requires_grad=False))
        self._owner = (owner,)  # a tuple, so that the owner does not become a submodule

    def quantize(self, value: Tensor) -> None:
        """Quantize the full weight (fp32, shape `self.shape`), and keep this rank's part."""
        whole = (value.T if self.transposed else value).contiguous().to(self.scales.device)
        words, state = quantize_4bit(whole, blocksize=_BLOCK, quant_type="nf4", quant_storage=torch.float32)
        self.scales.copy_(state.absmax)
        held, shape = self._owner[0].get_parameter(self.name).data, tuple(words.shape)
        for piece in dtensor_pieces(held, shape) if isinstance(held, DTensor) else whole_pieces(held, shape):
            piece.data.copy_(words[piece.box.slices_in(Box.whole(shape))])

    def state(self, dtype: torch.dtype) -> QuantState:
        """Describe the weight to bitsandbytes, which computes in `dtype`."""
        shape = torch.Size(self.shape[::-1] if self.transposed else self.shape)
        return QuantState(self.scales, shape=shape, code=self.code, blocksize=_BLOCK, quant_type="nf4", dtype=dtype)


class NF4Linear(nn.Module):
    """A linear layer with a frozen weight in NF4; the backward computes only the input's gradient."""

    def __init__(self, linear: nn.Linear | Conv1D) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.nf4 = NF4(self, "weight", isinstance(linear, Conv1D))

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        state = self.nf4.state(dtype)
        return bitsandbytes.matmul_4bit(x.to(dtype), self.weight.t(), quant_state=state, bias=bias)


class StackedNF4(Stacked):
    """Experts with one of their stacked parameters in NF4."""

    def __init__(self, inner: nn.Module, parameter: str) -> None:
        super().__init__(inner, parameter)
        self.nf4 = NF4(innermost(inner), parameter)

    def changed(self, weights: dict[str, Any]) -> Tensor:
        return dequantize_4bit(weights[self.parameter], self.nf4.state(torch.float32))


def _in_four_bits(experts: nn.Module) -> nn.Module:
    """Wrap experts so that their stacked matrices are in NF4."""
    wrapped = experts
    for name in matrices_of(experts):
        if experts.get_parameter(name).numel() % _BLOCK == 0:
            wrapped = StackedNF4(wrapped, name)
    return wrapped
