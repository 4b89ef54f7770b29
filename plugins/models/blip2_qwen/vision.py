"""timm vision transformers: construction, initial values, and parameter names in Hugging Face's BLIP-2."""

import math
import re

import timm
import torch
from timm.layers import set_fused_attn
from torch import Tensor, nn

from crosstrain import ConfigError, Excerpt

from .options import Vision

DEFAULT = "eva_giant_patch14_224"

# timm's names -> transformers' names, for ViT and EVA; the biases of EVA's attention are handled separately.
_BLIP2 = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj": "embeddings.patch_embedding",
    "norm": "post_layernorm",
}
_BLIP2_BLOCK = {
    "norm1": "layer_norm1", "norm2": "layer_norm2", "attn.qkv": "self_attn.qkv", "attn.proj": "self_attn.projection",
    "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2",
}  # fmt: skip


def make_encoder(options: Vision) -> nn.Module:
    """Make the encoder; its forward maps images [n, 3, H, W] to normalized tokens [n, tokens, width].

    Raises ConfigError if timm does not have the encoder, or if the sizes are inconsistent.
    """
    name = options.encoder or DEFAULT
    if not timm.is_model(name):
        near = timm.list_models(f"*{name.split('_')[0]}*")[:5]
        raise ConfigError(f"model.vision.encoder: timm has no model {name}; similar names: {', '.join(near) or 'none'}")
    given = {key: getattr(options, key) for key in options.sizes if getattr(options, key) is not None}
    if options.image_size is not None:
        given["img_size"] = options.image_size
    set_fused_attn(options.attention == "sdpa")
    try:
        encoder = timm.create_model(
            name, pretrained=False, num_classes=0, global_pool="", drop_path_rate=options.drop_path_rate, **given
        )
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"model.vision: timm cannot make {name} with {given}: {error}") from error
    finally:
        set_fused_attn(True)
    if not hasattr(encoder, "blocks"):
        raise ConfigError(f"model.vision.encoder: {name} is not a vision transformer with blocks of equal width")
    return encoder


def initialize(name: str, value: Tensor, rng: torch.Generator, options: Vision) -> None:
    """Fill in timm's initial values: truncated N(0, 0.02), biases 0, norms 1.

    The patch projection is initialized like torch's convolution. Layer scales are 1e-5. The position embedding has its
    own standard deviation. EVA's output projections are divided by sqrt(2 n) in the n-th block; n starts at 1.
    """
    block = re.match(r"blocks\.(\d+)\.(attn\.proj|mlp\.fc2)\.weight$", name)
    if name.endswith("bias"):
        value.zero_()
    elif re.search(r"gamma(_\d)?$", name):  # layer scale
        value.fill_(1e-5)
    elif value.ndim == 1:
        value.fill_(1.0)
    elif name.endswith("patch_embed.proj.weight"):
        bound = 1 / math.sqrt(value[0].numel())
        value.uniform_(-bound, bound, generator=rng)
    else:
        nn.init.trunc_normal_(value, std=options.position_std if name == "pos_embed" else 0.02, generator=rng)
        if block and "eva" in (options.encoder or DEFAULT):
            value.div_(math.sqrt(2 * (int(block[1]) + 1)))


def blip2_place(name: str, width: int) -> str | Excerpt:
    """Convert timm's name of an encoder parameter to a name in transformers' BLIP-2, or to an excerpt of a tensor.

    BLIP-2 has one bias for queries, keys and values; EVA has no key bias, because a key bias cancels in the softmax.
    """
    if found := re.match(r"blocks\.(\d+)\.attn\.([qv])_bias$", name):
        bias = f"vision_model.encoder.layers.{found[1]}.self_attn.qkv.bias"
        return Excerpt(bias, 0 if found[2] == "q" else 2 * width, 3 * width)
    if found := re.match(r"blocks\.(\d+)\.(.+?)(\.weight|\.bias)$", name):
        return f"vision_model.encoder.layers.{found[1]}.{_BLIP2_BLOCK.get(found[2], found[2])}{found[3]}"
    stem, _, last = name.rpartition(".")
    if last in ("weight", "bias"):
        return f"vision_model.{_BLIP2.get(stem, stem)}.{last}"
    return f"vision_model.{_BLIP2.get(name, name)}"
