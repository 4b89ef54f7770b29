"""transformers' image-text models, unmodified, from a configuration or a folder."""

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from crosstrain import (
    IGNORE_INDEX,
    PLAIN,
    ConfigError,
    Ends,
    ForwardMode,
    OptionError,
    PositiveFloat,
    has_values,
    registry,
)
from crosstrain.engine.precision import DTYPES
from crosstrain.inference.cache import ShiftedCache

from .causal_lm import CausalLM
from .hugging_face.attention import Documents
from .hugging_face.base import TransformersStructure, TransformersWeights
from .hugging_face.internals import POSITIONS_FROM_ONE, PREFIX_MODELS

# In names of modules that map from the vision model to the language model.
_PROJECTORS = ("merger", "projector", "connector", "image_newline")


@dataclass
class Part:
    """Options of one part of the model."""

    freeze: bool = False  # do not train the part: no gradient, no optimizer state
    lr_scale: PositiveFloat = 1.0  # multiplies run.init_lr
    weights: Literal["bf16", "fp16"] | None = None  # dtype in which frozen matrices are stored; None: fp32

    def __post_init__(self) -> None:
        if self.weights is not None and not self.freeze:
            raise OptionError("weights", f"trained weights are kept in fp32; {self.weights} needs freeze: true")


@registry.register_model("image_text")
class ImageText(CausalLM):
    """Any model that transformers' AutoModelForImageTextToText supports: Qwen2.5-VL, LLaVA, InternVL and others."""

    auto: ClassVar[Any] = AutoModelForImageTextToText
    cache_type = ShiftedCache
    splits_embeddings = True  # images are put into whole rows; see `_take_part`

    @dataclass
    class Options(CausalLM.Options):
        """`config` or `pretrained` selects the model; its three parts have options of their own."""

        families: ClassVar[Mapping[str, Any]] = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        kind: ClassVar = "image-text model"

        vision: Part = field(default_factory=Part)  # the vision model
        projector: Part = field(default_factory=Part)  # modules between the vision model and the language model
        language_model: Part = field(default_factory=Part)  # the language model with its head

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.mup_base_width is not None:
                raise OptionError("mup_base_width", "an image-text model has parts of several widths; leave it out")

    options: Options

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        base = self.lm.base_model
        self.takes_types = "token_type_ids" in inspect.signature(base.forward).parameters
        self.sees_all &= not self.takes_types  # the library's masks let tokens of an image see each other
        self.shares_rows |= self.takes_types  # such masks are made before rows are split
        self.decoder.register_forward_pre_hook(self._take_part, with_kwargs=True)
        if self.takes_types:
            base.register_forward_pre_hook(_with_mask, with_kwargs=True)
        self.structure, self.weights = _Structure(self), _Weights(self)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not self.part(name).freeze)
        for module in self._unused():
            module.requires_grad_(False)
        for name, module in self.named_modules():
            matrices = isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
            if matrices and (dtype := self.part(f"{name}.").weights) is not None:
                module.to(DTYPES[dtype])

    @property
    def decoder(self) -> Any:
        return self.lm.base_model.get_decoder()

    @classmethod
    def check_config(cls, config: PreTrainedConfig) -> None:
        if config.get_text_config() is config:
            raise ConfigError(f"model.config.model_type: {config.model_type} reads no images; use arch: causal_lm")

    def _unused(self) -> list[nn.Module]:
        """Return the modules of the vision model after the layer whose output is used: they get no gradients."""
        layer = getattr(self.config, "vision_feature_layer", None)
        if type(layer) is not int:
            return []
        seen = {id(module) for module in self.decoder.modules()}
        blocks = [block for block in self.blocks() if id(block) not in seen]
        after = blocks[layer if layer >= 0 else len(blocks) + 1 + layer :]  # layer 0 is the input of the first block
        return after + [module for name, module in self.named_modules() if name.endswith(".post_layernorm")]

    def part(self, name: str) -> Part:
        """Return the options of the part that a parameter or module belongs to."""
        inner = self.weights.canonical_name(name).removeprefix(f"{self.lm.base_model_prefix}.")
        if getattr(self.lm.base_model, inner.partition(".")[0], None) not in (None, self.decoder):
            return self.options.projector if any(kind in inner for kind in _PROJECTORS) else self.options.vision
        return self.options.language_model

    # ---- compute

    def forward(
        self, input_ids: Tensor | None = None, labels: Tensor | None = None, cache: Any = None,
        inputs_embeds: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        mode: ForwardMode = PLAIN, mm_token_type_ids: Tensor | None = None, **fields: Any,
    ) -> Tensor:  # fmt: skip
        """Implement `LanguageModel.forward`. mm_token_type_ids [batch, length]: 1 for tokens of images, else 0.

        fields: the processor's tensors of the images, in the order of their tokens.
        """
        others: dict[str, Any] = {}
        if fields and self._has_vision:
            others["mm_encoder_outputs"] = self._encode(fields)
        if input_ids is not None and not (cache is not None and cache.get_seq_length()):
            types = torch.zeros_like(input_ids) if mm_token_type_ids is None else mm_token_type_ids
            if self.config.model_type in PREFIX_MODELS:
                types = _answers(input_ids, labels, position_ids)
            if self.takes_types and self.context is not None and labels is not None:
                types = self.context.padded(types, int(self.config.model_type in PREFIX_MODELS))
            if self.takes_types:
                others["token_type_ids"] = types
            others["rotary"] = self._rotary(input_ids, types, position_ids, attention_mask, cache, fields)
        elif position_ids is not None:
            others["rotary"] = position_ids + (self.config.model_type in POSITIONS_FROM_ONE)
        with self._autocast(self.options.language_model, input_ids):
            return super().forward(
                input_ids, labels, cache, inputs_embeds, attention_mask, position_ids, mode, **others
            )  # fmt: skip

    def _autocast(self, part: Part, near: Tensor | None) -> AbstractContextManager[Any]:
        """Compute a part in the dtype of its frozen weights."""
        if part.weights is None or near is None:
            return nullcontext()
        return torch.autocast(near.device.type, DTYPES[part.weights])

    @property
    def _has_vision(self) -> bool:
        """False on a later pipeline stage."""
        children = self.lm.base_model.children()
        return any(next(child.parameters(), None) is not None for child in children if child is not self.decoder)

    def _encode(self, fields: dict[str, Tensor]) -> dict[str, Any]:
        """Return the features of images and videos, for the library's model to put into the sequence."""
        found = {}
        for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            if pixels in fields:
                compute = getattr(self.lm.base_model, f"get_{kind}_features")
                taken = {key: value for key, value in fields.items() if key in inspect.signature(compute).parameters}
                with self._autocast(self.options.vision, fields[pixels]):
                    found[kind] = compute(**taken, return_dict=True)
        return found

    def _rotary(
        self,
        ids: Tensor,
        types: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        cache: Any,
        fields: dict[str, Tensor],
    ) -> Tensor | None:
        """Return the positions for rotary embeddings, if they differ from `position_ids`.

        Qwen's models have positions [3, batch, length] in time, height and width. They depend on the sizes of the
        images, and are computed for each document. `cache.shift` becomes the difference between the next position and
        the number of tokens.
        """
        if self.config.model_type in POSITIONS_FROM_ONE:
            return None if position_ids is None else position_ids + 1
        if not hasattr(self.lm.base_model, "get_rope_index") or not has_values(ids):  # a plan has no values
            return None
        rows, mask = ids, attention_mask
        documents = None if position_ids is None or mask is not None else Documents.of(position_ids)
        if documents is not None:
            lengths = [stop - start for start, stop in zip(documents.starts, documents.starts[1:], strict=False)]
            rows = _padded(ids, lengths)
            mask = _padded(torch.ones_like(ids), lengths)
            types = _padded(types, lengths)
        sizes = {key: value for key, value in fields.items() if not key.startswith("pixel")}
        found, shift = self.lm.base_model.get_rope_index(rows, mm_token_type_ids=types, attention_mask=mask, **sizes)
        if isinstance(cache, ShiftedCache):
            cache.shift = shift
        if documents is not None:
            found = found[:, mask.bool()].view(len(found), *ids.shape)
        return found

    def _take_part(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pre-hook of the language model: with context parallelism, keep this rank's part of the embeddings."""
        embeddings, positions = kwargs["inputs_embeds"], kwargs.get("position_ids")
        if self.context is None or positions is None or positions.shape[-1] == embeddings.shape[1]:
            return args, kwargs
        part = self.context.part
        kwargs = kwargs | {"inputs_embeds": part(embeddings.mT).mT}
        if (mask := kwargs.get("visual_pos_masks")) is not None:  # Qwen3-VL adds features to later hidden states too
            kept = part(mask.flatten().cumsum(0).view(mask.shape) - 1)[part(mask)]
            features = [layer[kept] for layer in kwargs["deepstack_visual_embeds"]]
            kwargs |= {"visual_pos_masks": part(mask), "deepstack_visual_embeds": features}
        return args, kwargs


def _with_mask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pre-hook: make transformers build its mask from places in the row, not from positions in documents.

    Without a mask, transformers 5.24 finds the documents itself, and then reads `token_type_ids` at the wrong places.
    Attention is computed for each document with its part of the mask.
    """
    if "documents" in kwargs and kwargs.get("attention_mask") is None:
        kwargs = kwargs | {"attention_mask": torch.ones_like(kwargs["token_type_ids"])}
    return args, kwargs


class _Structure(TransformersStructure):
    model: ImageText

    def decoder_blocks(self) -> list[nn.Module]:
        inside = {id(module) for module in self.model.decoder.modules()}
        return [block for block in self.model.blocks() if id(block) in inside]

    def ends(self) -> Ends | None:
        """The vision model and the projector run before the first block, in the first stage."""
        found, decoder = super().ends(), self.model.decoder
        if found is None or sum(isinstance(module, nn.ModuleList) for module in decoder.children()) != 1:
            return None
        names = {module: name for name, module in self.model.named_modules()}
        seen = [names[module] for module in self.model.lm.base_model.children() if module is not decoder]
        read = getattr(self.model.config.vision_config, "deepstack_visual_indexes", None) or [0]
        return Ends([*seen, *found.first], found.last, len(read))


class _Weights(TransformersWeights):
    model: ImageText

    def lr_scale(self, name: str) -> float:
        return self.model.part(name).lr_scale


def _padded(tokens: Tensor, lengths: list[int]) -> Tensor:
    """Return the documents of flattened rows as rows of their own, padded with zeros on the right."""
    return nn.utils.rnn.pad_sequence(tokens.flatten().split(lengths), batch_first=True)


def _answers(ids: Tensor, labels: Tensor | None, position_ids: Tensor | None) -> Tensor:
    """Return 1 for tokens after the first target of their document, else 0: a prompt, whose tokens see each other."""
    if labels is None:
        return torch.zeros_like(ids)
    targets = (labels != IGNORE_INDEX).long()
    before = targets.cumsum(1) - targets  # targets before each position, in the row
    if position_ids is not None:
        before = before - torch.where(position_ids == 0, before, 0).cummax(1).values
    return (before > 0).long()
