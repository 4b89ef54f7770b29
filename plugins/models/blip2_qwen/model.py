"""BLIP-2 (Li et al., 2023): a vision transformer, a Q-Former and a projection in front of a language model."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Blip2QFormerConfig, Blip2QFormerModel

from crosstrain import (
    IGNORE_INDEX,
    IMAGE_ID,
    PLAIN,
    SHARED,
    Component,
    ConfigError,
    DataError,
    Dataset,
    Ends,
    Export,
    ForwardMode,
    LanguageModel,
    Merge,
    Model,
    Quantized,
    ReadParameter,
    Source,
    Structure,
    Text,
    Weights,
    has_values,
    registry,
    to_plain,
    write_json,
)
from crosstrain.engine.build import add_adapter
from crosstrain.engine.precision import DTYPES
from crosstrain.modeling.activation_checkpointing import Mode
from crosstrain.modeling.context import Context

from . import vision, weights
from .options import Language, Part, Projector, QFormer, Vision

# Part (also the name of its module) -> prefix of its parameters' canonical names. Canonical names are the parameter
# names of transformers' Blip2ForConditionalGeneration; inside the vision transformer, they are timm's names.
_PREFIXES = {
    "vision": weights.VISION, "qformer": "qformer.", "projector": "language_projection.",
    "language_model": "language_model.",
}  # fmt: skip
_MODULE_OF_QUERIES = "queries"


class Queries(nn.Module):
    """The Q-Former's queries [1, queries, width]; a module of their own, so that pipeline stages can leave them out."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.query_tokens = nn.Parameter(torch.empty(1, count, width))


class WithQFormer(Model):
    """A model with a vision transformer and a Q-Former; folders with pretrained weights decide sizes that are None."""

    def __init__(self, options: Any, **qformer: Any) -> None:
        """qformer: further settings of transformers' configuration of the Q-Former."""
        self.folders = weights.folders(options)
        options = weights.sized(options, self.folders)
        super().__init__(options)
        self.vision = vision.make_encoder(options.vision)
        self.image_size: tuple[int, int] = tuple(map(int, self.vision.patch_embed.img_size))  # type: ignore
        self.width: int = self.vision.embed_dim  # type: ignore[assignment]
        asking = options.qformer
        config = Blip2QFormerConfig(
            encoder_hidden_size=self.width,
            hidden_dropout_prob=asking.dropout,
            attention_probs_dropout_prob=asking.dropout,
            attn_implementation=asking.attention,
            **{key: size for key in asking.published if (size := getattr(asking, key)) is not None},
            **qformer,
        )
        self.qformer = Blip2QFormerModel(config)
        self.queries = Queries(asking.num_query_tokens or 32, config.hidden_size)

    def check_dataset(self, dataset: Dataset) -> None:
        """Raise ConfigError if a dataset's images do not have the encoder's image size."""
        if others := sorted(getattr(dataset, "image_sizes", frozenset()) - {self.image_size}):
            theirs, ours = (" x ".join(map(str, sides)) for sides in (others[0], self.image_size))
            raise ConfigError(
                f"datasets: images have {theirs} pixels, but the model takes {ours}: use the same image_size in every "
                f"image processor and in the model"
            )


@registry.register_model("blip2_qwen")
class Blip2Qwen(WithQFormer):
    """EVA-ViT-g, BLIP-2's Q-Former and a projection in front of Qwen; by default, only the projection is trained."""

    @dataclass
    class Options:
        """Options of the model's four parts."""

        pretrained: Text | None = None  # run, checkpoint or exported folder to load weights of all parts from
        vision: Vision = field(default_factory=Vision)
        qformer: QFormer = field(default_factory=QFormer)
        projector: Projector = field(default_factory=Projector)
        language_model: Language = field(default_factory=Language)

    options: Options
    base_model_prefix: ClassVar = ""  # as in TransformersModel

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        language = registry.get("model", options.language_model.model.name)(options.language_model.model.options)
        if not isinstance(language, LanguageModel):
            raise ConfigError(
                f"model.language_model.model: {options.language_model.model.name} is not a language model that takes "
                f"embeddings"
            )
        self.projector = _projector(options.projector, self.qformer.config.hidden_size, language.hidden_size)
        self.language_model, self.takes_positions = language, language.takes_positions
        self.structure, self.weights, self.export = _Structure(self), _Weights(self), _Export(self)
        self._freeze()

    def _freeze(self) -> None:
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not self.part(name).freeze)
        if (given := self.options.language_model.lora) is not None:
            lora = Component("lora", registry.get("adapter", "lora").Options(**vars(given)))
            add_adapter(lora, self.language_model, "model.language_model.lora")
            if not self.options.language_model.freeze:
                self.language_model.requires_grad_(True)
        for part in _PREFIXES:
            if (kept := getattr(self.options, part).weights) is not None:
                weights.keep_matrices_in(DTYPES[kept], getattr(self, part))

    # ---- compute

    @property
    def context(self) -> Context | None:  # type: ignore[override]
        """The ranks that share rows; the language model splits the embeddings."""
        return self.language_model.context

    @context.setter
    def context(self, ranks: Context | None) -> None:
        self.language_model.context = ranks

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        pixel_values: Tensor | None = None,
        segments: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        mode: ForwardMode = PLAIN,
    ) -> Tensor:
        """Implement `Model.forward`. input_ids [batch, length] has one placeholder `IMAGE_ID` per image embedding.

        pixel_values [images, 3, H, W]: the images of all samples, in the order of their placeholders. segments
        [batch, length]: a token attends to earlier tokens of its own segment and of segment `SHARED`. position_ids,
        attention_mask: see `LanguageModel.forward`. Raises DataError unless images and placeholders match.
        """
        if self.context is not None and labels is not None:
            padded = self.context.padded
            input_ids, labels = padded(input_ids, 0), padded(labels, IGNORE_INDEX)
            segments = None if segments is None else padded(segments, SHARED)
            position_ids = None if position_ids is None else padded(position_ids, 0)
        with self._precision("language_model", input_ids.device):
            embeddings = self.language_model.embed(input_ids.clamp(min=0))
        begins = pixel_values is not None or labels is not None or cache is None or not cache.get_seq_length()
        if begins and next(self.vision.parameters(), None) is not None:  # a later pipeline stage has no vision model
            size = (1, 3, *self.image_size)
            images = torch.zeros(size, device=input_ids.device) if pixel_values is None else pixel_values
            features = self.encode_images(images).to(embeddings.dtype)
            if pixel_values is None:
                # A rank without images must still use the same parameters and reduce the same gradients as other ranks.
                embeddings = embeddings + 0.0 * features.sum()
            else:
                embeddings = _insert(embeddings, input_ids == IMAGE_ID, features)
        if segments is not None:
            attention_mask = _segment_mask(segments)
        with self._precision("language_model", input_ids.device):
            return self.language_model(
                inputs_embeds=embeddings,
                labels=labels,
                cache=cache,
                attention_mask=attention_mask,
                position_ids=position_ids,
                **mode.arguments(),
            )

    def encode_images(self, images: Tensor) -> Tensor:
        """Return embeddings [images, num_query_tokens, width of the language model] of images [images, 3, H, W]."""
        with self._without_gradients("vision"), self._precision("vision", images.device):
            seen = self.vision(images).float()
        with self._without_gradients("vision", "qformer"), self._precision("qformer", images.device):
            queries = self.queries.query_tokens.expand(len(images), -1, -1)
            answered = self.qformer(query_embeds=queries, encoder_hidden_states=seen).last_hidden_state.float()
        with self._precision("projector", images.device):
            return self.projector(answered)

    def _without_gradients(self, *parts: str) -> AbstractContextManager[Any]:
        """Return torch.no_grad() if these parts are frozen; they must be the first parts of the forward."""
        return torch.no_grad() if all(getattr(self.options, part).freeze for part in parts) else nullcontext()

    def _precision(self, part: str, device: torch.device) -> AbstractContextManager[Any]:
        """Autocast to the part's own precision; if it is None, keep the run's precision."""
        precision = getattr(self.options, part).precision
        if precision is None:
            return nullcontext()
        return torch.autocast(device.type, DTYPES[precision] if precision != "fp32" else None, precision != "fp32")

    def train(self, mode: bool = True) -> "Blip2Qwen":
        """Set the mode as in torch, but keep frozen parts in eval mode: no dropout, no stochastic depth."""
        super().train(mode)
        for part in _PREFIXES:
            if getattr(self.options, part).freeze:
                getattr(self, part).eval()
        for name, module in self.language_model.named_modules():
            if ".lora_dropout" in name:  # adapters are trained even if the part is frozen
                module.train(mode)
        return self

    # ---- structure

    def part(self, name: str) -> Part:
        """Return the options of the part that a parameter belongs to."""
        first = name.partition(".")[0]
        return getattr(self.options, "qformer" if first == _MODULE_OF_QUERIES else first)

    def block_lists(self) -> dict[str, list[nn.Module]]:
        return {
            "vision": list(self.vision.blocks),  # type: ignore[arg-type]
            "qformer": list(self.qformer.encoder.layer),
            "language_model": self.language_model.blocks(),
        }

    def blocks(self) -> list[nn.Module]:
        return [block for blocks in self.block_lists().values() for block in blocks]

    @property
    def vocab_size(self) -> int | None:
        return self.language_model.vocab_size

    @property
    def max_length(self) -> int | None:
        return self.language_model.max_length

    def new_cache(self) -> Any:
        return self.language_model.new_cache()


class _Structure(Structure):
    model: Blip2Qwen

    def ends(self) -> Ends | None:
        """All other parts run before the language model's first block, in the first stage."""
        inner = self.model.language_model.structure.ends()
        if inner is None:
            return None
        first, last = ([f"language_model.{name}" for name in names] for names in (inner.first, inner.last))
        return Ends(["vision", "qformer", _MODULE_OF_QUERIES, "projector", *first], last)

    def decoder_blocks(self) -> list[nn.Module]:
        return self.model.language_model.structure.decoder_blocks()

    def check_context(self, ranks: int) -> None:
        self.model.language_model.structure.check_context(ranks)

    def chains(self) -> list[list[nn.Module]]:
        return [self.model.block_lists()["vision"], *self.model.language_model.structure.chains()]

    def checkpointing(self, mode: Mode) -> list[tuple[list[nn.Module], Mode]]:
        options, lists = self.model.options, self.model.block_lists()
        return [(blocks, getattr(options, part).gradient_checkpointing or mode) for part, blocks in lists.items()]

    def lighter(self, dtype: str) -> dict[str, str]:
        """Suggest storing frozen matrices in their compute dtype."""
        found = {}
        for part in _PREFIXES:
            options = getattr(self.model.options, part)
            kept = options.precision or dtype
            if options.freeze and options.weights is None and kept != "fp32":
                found |= {f"{part}.{key}": kept for key in ("precision", "weights") if not getattr(options, key)}
        return found

    def adapted(self) -> Model:
        if self.model.options.language_model.lora is not None:
            raise ConfigError("model.adapter: model.language_model.lora is already an adapter; remove one of them")
        return self.model.language_model

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Return the language model's plan; the other parts are replicated."""
        return {
            _PREFIXES["language_model"] + key: style
            for key, style in self.model.language_model.structure.tensor_parallel_plan().items()
        }

    @property
    def reads_across(self) -> bool:  # type: ignore[override]
        return self.model.language_model.structure.reads_across


class _Weights(Weights):
    model: Blip2Qwen

    def __init__(self, model: Blip2Qwen) -> None:
        super().__init__(model)
        self.vocabulary_multiple = model.language_model.weights.vocabulary_multiple

    def lr_scale(self, name: str) -> float:
        return self.model.part(name).lr_scale if name.partition(".")[0] in (*_PREFIXES, _MODULE_OF_QUERIES) else 1.0

    def canonical_name(self, name: str) -> str:
        part, _, rest = name.partition(".")
        if part == _MODULE_OF_QUERIES:
            return rest
        inner = self.model.language_model.weights.canonical_name(rest) if part == "language_model" else rest
        return _PREFIXES[part] + inner

    def quantized(self) -> dict[str, Quantized]:
        return {
            _PREFIXES["language_model"] + name: kept
            for name, kept in self.model.language_model.weights.quantized().items()
        }

    def logical_shape(self, name: str, shape: torch.Size) -> torch.Size:
        inner = name.removeprefix(_PREFIXES["language_model"])
        return shape if inner == name else self.model.language_model.weights.logical_shape(inner, shape)

    def initialize(self, name: str, value: Tensor, rng: torch.Generator) -> None:
        """Fill in initial values as timm, transformers or the language model does, depending on the part."""
        prefix, options = _PREFIXES["language_model"], self.model.options
        if name.startswith(prefix):
            self.model.language_model.weights.initialize(name.removeprefix(prefix), value, rng)
        else:
            part = options.projector if name.startswith(_PREFIXES["projector"]) else options.qformer
            weights.initialize(name, value, rng, options, part.initializer_range)

    def sources(self) -> list[Source]:
        return weights.sources(self.model.folders, _PREFIXES, self.model.width, self.model.language_model)


class _Export(Export):
    model: Blip2Qwen

    def parts(self) -> dict[str, tuple[tuple[str, ...], Model | None]]:
        models = {"language_model": self.model.language_model}
        return {part: (weights.owned(part, _PREFIXES), models.get(part)) for part in _PREFIXES}

    def merges(self) -> dict[str, Merge]:
        """Return parameter name -> merge of the language model's adapters into the parameter."""
        prefix = _PREFIXES["language_model"]
        return {
            prefix + name: Merge(tuple(prefix + other for other in merge.others), merge.combine)
            for name, merge in self.model.language_model.export.merges().items()
        }

    def save_config(self, folder: Path) -> None:
        write_json(folder / "config.json", {"arch": "blip2_qwen", **to_plain(self.model.options)})

    def save_parts(self, folder: Path, names: set[str], read: ReadParameter) -> None:
        """Save the language model's adapters."""
        prefix = _PREFIXES["language_model"]
        own = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
        self.model.language_model.export.save_parts(folder, own, lambda name: read(prefix + name))


def _projector(options: Projector, width: int, out: int) -> nn.Module:
    return (
        nn.Linear(width, out)
        if options.kind == "linear"
        else nn.Sequential(nn.Linear(width, out), nn.GELU(), nn.Linear(out, out))
    )


def _insert(embeddings: Tensor, places: Tensor, features: Tensor) -> Tensor:
    """Replace the embeddings at `places` [batch, length] with image features [images, queries, width], in order."""
    if has_values(places) and features.shape[:2].numel() != (found := int(places.sum())):
        raise DataError(
            f"{features.shape[0]} images of {features.shape[1]} query tokens do not fill {found} placeholders: set the "
            f"dataset's image_tokens to model.qformer.num_query_tokens, which is {features.shape[1]}"
        )
    return embeddings.masked_scatter(places[..., None], features.reshape(-1, features.shape[-1]))


def _segment_mask(segments: Tensor) -> Tensor:
    """Return a boolean attention mask [batch, 1, queries, keys]: True where the query attends to the key."""
    earlier = torch.ones(segments.shape[1], segments.shape[1], dtype=torch.bool, device=segments.device).tril()
    own = segments[:, :, None] == segments[:, None, :]
    return ((own | (segments == SHARED)[:, None, :]) & earlier)[:, None]
