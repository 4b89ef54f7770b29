"""Options of the model's parts."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from annotated_types import Interval, MinLen

from crosstrain import Component, OptionError, PositiveFloat, Text

from ..hugging_face.base import DropRate, Layers, Size


@dataclass(kw_only=True)
class Part:
    """Options common to all parts."""

    freeze: bool = True  # do not train the part: eval mode, no gradient, no optimizer state
    precision: Literal["fp32", "bf16", "fp16"] | None = None  # compute dtype; None: the dtype of run.amp
    weights: Literal["bf16", "fp16"] | None = None  # dtype in which frozen matrices are stored; None: fp32
    lr_scale: PositiveFloat = 1.0  # multiplies run.init_lr
    gradient_checkpointing: Literal["none", "full", "selective", "offload"] | None = None  # None: the run's mode

    def __post_init__(self) -> None:
        if self.weights is not None and not self.freeze:
            raise OptionError("weights", f"trained weights are kept in fp32; {self.weights} needs freeze: true")
        if self.weights is not None and self.precision != self.weights:
            raise OptionError("weights", f"weights in {self.weights} need precision: {self.weights}")


@dataclass(kw_only=True)
class Vision(Part):
    """A timm vision transformer. Sizes that are None come from the pretrained weights, or else from timm."""

    sizes: ClassVar = ("patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "class_token")
    published: ClassVar = ("encoder", "image_size", *sizes)

    encoder: Text | None = None  # timm's model name; None: eva_giant_patch14_224
    pretrained: Text | None = None  # folder or name of timm or Hugging Face BLIP-2 weights, or a run
    image_size: Annotated[int, Interval(ge=1, le=4096)] | None = None  # height and width of images in pixels
    patch_size: Size | None = None  # height and width of patches in pixels
    embed_dim: Size | None = None  # hidden size
    depth: Layers | None = None  # number of blocks; BLIP-2 uses 39 of EVA-ViT-g's 40
    num_heads: Size | None = None  # attention heads per block
    mlp_ratio: PositiveFloat | None = None  # MLP width divided by embed_dim
    class_token: bool | None = None  # add a class token to the patch tokens
    drop_path_rate: DropRate = 0.0  # rate of stochastic depth
    position_std: PositiveFloat = 0.02  # standard deviation of the initial position embedding
    attention: Literal["sdpa", "eager"] = "sdpa"  # sdpa: torch's fused operator; eager: separate matmuls


@dataclass(kw_only=True)
class QFormer(Part):
    """BLIP-2's querying transformer (Li et al., 2023).

    Sizes that are None come from the pretrained weights, or else from BLIP-2.
    """

    sizes: ClassVar = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    published: ClassVar = (*sizes, "cross_attention_frequency", "layer_norm_eps")

    pretrained: Text | None = None  # folder or name of Hugging Face BLIP-2 weights, or a run
    num_query_tokens: Size | None = None  # embeddings per image; None: as in `pretrained`, else 32
    hidden_size: Size | None = None  # hidden size; None: as in `pretrained`, else 768
    num_hidden_layers: Layers | None = None  # number of blocks; None: as in `pretrained`, else 12
    num_attention_heads: Size | None = None  # attention heads per block; None: as in `pretrained`, else 12
    intermediate_size: Size | None = None  # MLP width; None: as in `pretrained`, else 3072
    cross_attention_frequency: Size | None = None  # every n-th block, from the first, attends to the image; None: 2
    dropout: DropRate = 0.1  # dropout rate of embeddings, residuals and attention
    layer_norm_eps: PositiveFloat | None = None  # added to the variance; None: as in `pretrained`, else 1e-12
    initializer_range: PositiveFloat = 0.02  # standard deviation of the initial values of matrices
    query_std: PositiveFloat = 0.02  # standard deviation of the initial queries
    attention: Literal["sdpa", "eager"] = "sdpa"  # transformers' attention implementation

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size and self.num_attention_heads and self.hidden_size % self.num_attention_heads:
            raise OptionError(
                "num_attention_heads", f"{self.num_attention_heads} does not divide hidden_size={self.hidden_size}"
            )


@dataclass(kw_only=True)
class Projector(Part):
    """The projection from the Q-Former's width to the language model's width."""

    freeze: bool = False
    pretrained: Text | None = None  # run, checkpoint or exported folder to start from
    kind: Literal["linear", "mlp"] = "linear"  # mlp: two linear layers with a GELU between them
    initializer_range: PositiveFloat = 0.02  # standard deviation of the initial values of matrices


@dataclass
class Lora:
    """Low-rank adapters (Hu et al., 2021) from peft; adapters are trained even if the language model is frozen."""

    rank: Size = 8  # rows of A and columns of B
    alpha: PositiveFloat = 16.0  # adapter outputs are scaled by alpha / rank
    dropout: DropRate = 0.05  # dropout rate of the adapters' input
    targets: Annotated[list[Text], MinLen(1)] = field(  # names of linear layers
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


@dataclass(kw_only=True)
class Language(Part):
    """A registered causal language model, which has its own option `pretrained`."""

    # any registered language model
    model: Annotated[Component, "model"] = field(default_factory=lambda: Component("qwen"))
    lora: Lora | None = None  # low-rank adapters on the language model; None: no adapters
