"""The weights that a runner may gather and send in bf16, because autocast rounds them anyway."""

from torch import nn

from crosstrain import Model, RunOptions


def linear_weights(model: Model) -> list[nn.Parameter]:
    """Parameters of the linear layers in blocks; autocast rounds them before each use."""
    layers = [module for block in model.blocks() for module in block.modules() if is_linear(module)]
    return [parameter for layer in layers for parameter in layer.parameters(recurse=False)]


def is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D  # imported here so that runners load without transformers

    return isinstance(module, (nn.Linear, Conv1D))


def computes_in_half(run: RunOptions, model: Model) -> bool:
    """True if only bf16 matmuls read the weights of linear layers, so the weights may be rounded in advance."""
    in_bf16 = (run.amp.dtype, run.amp.linear, run.compile) == ("bf16", None, "none")
    return in_bf16 and not (model.structure.reads_across or model.weights.quantized())
