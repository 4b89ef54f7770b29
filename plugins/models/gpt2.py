"""GPT-2: transformers' GPT2LMHeadModel, unmodified, with a loss that never materializes the full logits."""

import copy
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from crosstrain import (
    ConfigError,
    Ends,
    PositiveFloat,
    Text,
    TransformersModel,
    TransformersStructure,
    TransformersWeights,
    build_transformers,
    pretrained_folder,
    registry,
)

from .hugging_face.attention import Attention
from .hugging_face.base import DropRate, Layers, Size, check_published
from .hugging_face.mup import MaximalUpdate


@registry.register_model("gpt2")
class GPT2(TransformersModel):
    """Decoder-only language model with tied embeddings (Radford et al., 2019)."""

    @dataclass
    class Options:
        """Sizes that are None come from the pretrained model, or else from GPT-2 small."""

        published: ClassVar = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")

        pretrained: Text | None = None  # Hugging Face name, folder or .gguf file; None: random initialization
        vocab_size: Size | None = None  # number of token IDs; None: as in `pretrained`, else 50257
        n_positions: Size | None = None  # longest sequence in tokens; None: as in `pretrained`, else 1024
        n_embd: Size | None = None  # hidden size; None: as in `pretrained`, else 768
        n_layer: Layers | None = None  # number of blocks; None: as in `pretrained`, else 12
        n_head: Size | None = None  # attention heads per block; None: as in `pretrained`, else 12
        initializer_range: PositiveFloat | None = None  # standard deviation of initial weights; None: 0.02
        dropout: DropRate = 0.1  # dropout rate of embeddings, residuals and attention
        make_vocab_size_divisible_by: Size = 128  # pad embedding rows to a multiple of this; padding is not saved
        attention: Attention = "sdpa"  # transformers' attention implementation
        # hidden size of the model for which run.init_lr was tuned (maximal update parametrization); None: not scaled
        mup_base_width: Size | None = None

    def __init__(self, options: Options) -> None:
        source = pretrained_folder(options.pretrained) if options.pretrained else None
        given = {key: size for key in options.published if (size := getattr(options, key)) is not None}
        if source is not None:
            check_published(GPT2Config.from_pretrained(source), given, source)
        if options.initializer_range is not None:
            given["initializer_range"] = options.initializer_range
        given |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), options.dropout)
        if options.vocab_size is not None:  # the last token is the end-of-text token
            given |= dict.fromkeys(("bos_token_id", "eos_token_id"), options.vocab_size - 1)
        config = GPT2Config.from_pretrained(source, **given) if source else GPT2Config(**given)
        if config.n_embd % config.n_head:
            raise ConfigError(f"model.n_head: {config.n_head} heads do not divide n_embd={config.n_embd} evenly")
        computed = copy.deepcopy(config)
        # gelu_pytorch_tanh is gelu_new as one operator: it is faster, and autograd saves a third as many activations.
        if computed.activation_function == "gelu_new":
            computed.activation_function = "gelu_pytorch_tanh"
        lm = build_transformers(GPT2LMHeadModel, computed, options.make_vocab_size_divisible_by, options.attention)
        super().__init__(options, config, lm, source)
        self.structure, self.weights = _Structure(self), _Weights(self)
        if options.mup_base_width is not None:
            self.weights = MaximalUpdate(self, options.mup_base_width)


class _Structure(TransformersStructure):
    def ends(self) -> Ends:
        return Ends(
            ["lm.transformer.wte", "lm.transformer.wpe", "lm.transformer.drop"], ["lm.transformer.ln_f", "lm.lm_head"]
        )

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Return Megatron-LM's plan (Shoeybi et al., 2019, section 3): shard heads, MLP width and vocabulary."""
        return {
            "transformer.wte": "vocabulary",
            "transformer.h.*.attn.c_attn": "fused_qkv",
            "transformer.h.*.attn.split_size": "divide",
            "transformer.h.*.attn.c_proj": "row",
            "transformer.h.*.mlp.c_fc": "column",
            "transformer.h.*.mlp.c_proj": "row",
        }


class _Weights(TransformersWeights):
    def initialize(self, name: str, value: Tensor, rng: torch.Generator) -> None:
        """Fill `value` as GPT2PreTrainedModel._init_weights does, with N(0, initializer_range).

        The standard deviation of output projections is divided by sqrt(2 n_layer).
        """
        if name.endswith(".bias"):
            value.zero_()
        elif ".ln_" in name:
            value.fill_(1.0)
        else:
            std = self.model.config.initializer_range
            if name.endswith("c_proj.weight"):
                std /= math.sqrt(2 * self.model.config.n_layer)
            value.normal_(0.0, std, generator=rng)
