"""Options of the model's parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from annotated_types import Interval, MinLen

from crosstrain import Component, OptionError, PositiveFloat, Text

from ..hugging_face.base import DropRate, Layers, Size


@dataclass(kw_only=True)
class Part:
    """Options of every part."""

    freeze: bool = True  # not trained: eval mode, no gradient, no optimizer state
    precision: Literal["fp32", "bf16", "fp16"] | None = None  # of computation; None: as the run
    weights: Literal["bf16", "fp16"] | None = None  # dtype of its frozen matrices; None: fp32
    lr_scale: PositiveFloat = 1.0  # factor on run.init_lr
    gradient_checkpointing: Literal["none", "full", "selective", "offload"] | None = None  # None: as the run

    def __post_init__(self) -> None:
        if self.weights is not None and not self.freeze:
            raise OptionError("weights", f"trained weights are kept in fp32; {self.weights} needs freeze: true")
        if self.weights is not None and self.precision != self.weights:
            raise OptionError("weights", f"{self.weights} needs precision: {self.weights}, to be computed in")


@dataclass(kw_only=True)
class Vision(Part):
    """A vision transformer of timm; sizes that are not given are the pretrained weights', or the encoder's own."""

    sizes: ClassVar = ("patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "class_token")
    published: ClassVar = ("encoder", "image_size", *sizes)

    encoder: Text | None = None  # timm's name; eva_giant_patch14_224
    pretrained: Text | None = None  # a folder or name of timm's weights, or of a Hugging Face BLIP-2, or a run
    image_size: Annotated[int, Interval(ge=1, le=4096)] | None = None  # height and width in pixels
    patch_size: Size | None = None  # height and width in pixels
    embed_dim: Size | None = None  # width
    depth: Layers | None = None  # blocks; BLIP-2 uses 39 of EVA-ViT-g's 40
    num_heads: Size | None = None  # of attention
    mlp_ratio: PositiveFloat | None = None  # width of the MLP / embed_dim
    class_token: bool | None = None  # an embedding beside those of the patches
    drop_path_rate: DropRate = 0.0  # stochastic depth
    position_std: PositiveFloat = 0.02  # standard deviation of the position embedding's initial values
    attention: Literal["sdpa", "eager"] = "sdpa"  # torch's fused operator, or plain products


@dataclass(kw_only=True)
class QFormer(Part):
    """BLIP-2's querying transformer (Li et al., 2023); sizes default to the pretrained weights', or to BLIP-2's."""

    sizes: ClassVar = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    published: ClassVar = (*sizes, "cross_attention_frequency", "layer_norm_eps")

    pretrained: Text | None = None  # a folder or name of a Hugging Face BLIP-2, or a run
    num_query_tokens: Size = 32  # embeddings that stand for an image
    hidden_size: Size | None = None  # width; 768
    num_hidden_layers: Layers | None = None  # blocks; 12
    num_attention_heads: Size | None = None  # heads of each block; 12
    intermediate_size: Size | None = None  # width of the MLP; 3072
    cross_attention_frequency: Size | None = None  # each n-th layer, from the first one on, attends to the image; 2
    dropout: DropRate = 0.1  # of embeddings, residuals and attention alike
    layer_norm_eps: PositiveFloat | None = None  # added to the variance; 1e-12
    initializer_range: PositiveFloat = 0.02  # standard deviation of the initial values of matrices
    query_std: PositiveFloat = 0.02  # standard deviation of the queries' initial values
    attention: Literal["sdpa", "eager"] = "sdpa"  # transformers' attention implementation

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size and self.num_attention_heads and self.hidden_size % self.num_attention_heads:
            raise OptionError(
                "num_attention_heads", f"{self.num_attention_heads} does not divide hidden_size={self.hidden_size}"
            )


@dataclass(kw_only=True)
class Projector(Part):
    """The projection from the Q-Former's width to the language model's."""

    freeze: bool = False
    pretrained: Text | None = None  # a run, a checkpoint or an exported folder that has it
    kind: Literal["linear", "mlp"] = "linear"  # mlp: two linear maps with a GELU between them
    initializer_range: PositiveFloat = 0.02  # standard deviation of the initial values of matrices


@dataclass
class Lora:
    """Low-rank adapters (Hu et al., 2021) by peft; they are always trained."""

    rank: Size = 8  # rows of A and columns of B
    alpha: PositiveFloat = 16.0  # the adapters' output is scaled by alpha / rank
    dropout: DropRate = 0.05  # of the adapters' input
    targets: Annotated[list[Text], MinLen(1)] = field(  # names of linear maps
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


@dataclass(kw_only=True)
class Language(Part):
    """A causal language model of the registry, with its own `pretrained`."""

    # any language model of the registry
    model: Annotated[Component, "model"] = field(default_factory=lambda: Component("qwen"))
    lora: Lora | None = None
