"""Float8 training of linear layers with torchao."""

import torch

from crosstrain.modeling.base import Model
from crosstrain.utils.logging import log
from crosstrain.utils.optional_deps import require

MULTIPLE = 16  # GPU kernels need in_features and out_features to be multiples of 16


def fits(module: torch.nn.Module) -> bool:
    """True for a linear layer that can compute in float8; subclasses, such as quantized layers, are excluded."""
    return type(module) is torch.nn.Linear and not (module.in_features % MULTIPLE or module.out_features % MULTIPLE)


def convert(model: Model, device: torch.device) -> None:
    """Replace linear layers in the blocks with torchao's float8 layers; parameters and their names are unchanged.

    On devices without float8 matmuls, torchao emulates them: values are rounded to float8 and multiplied in higher
    precision.
    """
    float8 = require("torchao.float8", "run.amp.linear: float8")
    emulate = device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)
    config = float8.Float8LinearConfig(emulate=emulate, pad_inner_dim=True)  # padding allows any number of tokens
    for block in model.blocks():
        float8.convert_to_float8_training(block, config=config, module_filter_fn=lambda module, _: fits(module))
    layers = [module for block in model.blocks() for module in block.modules() if isinstance(module, torch.nn.Linear)]
    torch.set_autocast_dtype("cuda", torch.bfloat16)  # torchao's layers read this dtype on every device
    count = sum(isinstance(layer, float8.float8_linear.Float8Linear) for layer in layers)
    log.info("%d of %d linear layers in the blocks compute in float8%s", count, len(layers), ", emulated" * emulate)
