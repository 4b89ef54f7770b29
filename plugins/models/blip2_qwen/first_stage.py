"""BLIP-2's first stage (Li et al., 2023, section 3.2): contrast, matching and captioning train a Q-Former.

A later run of `blip2_qwen` takes the parts from a run of this model: `qformer: {pretrained: RUN}`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Interval
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, linear, normalize

from crosstrain import (
    IGNORE_INDEX,
    Batch,
    DataError,
    Export,
    PositiveFloat,
    PositiveInt,
    Source,
    Text,
    Weights,
    registry,
    to_plain,
    write_json,
)

from . import weights
from .model import WithQFormer
from .options import QFormer, Vision

_PREFIXES = {"vision": weights.VISION, "qformer": "qformer."}


@registry.register_model("blip2")
class Blip2(WithQFormer):
    """A vision transformer and a Q-Former with text, trained with images and captions before there is a language model.

    A sample has one image and a caption: the targets of a dataset such as `image_text`. Each micro batch has a loss of
    its own, because its samples are the negatives of each other; so micro batches should be large.
    """

    @dataclass
    class Options:
        """Options of the parts, of the text and of the losses."""

        pretrained: Text | None = None  # run, checkpoint or converted folder to load weights of all parts from
        vision: Vision = field(default_factory=Vision)
        qformer: QFormer = field(default_factory=lambda: QFormer(freeze=False))
        vocab_size: PositiveInt = 30522  # tokens of the captions' tokenizer
        max_text_length: PositiveInt = 32  # longer captions are cut
        embed_dim: PositiveInt = 256  # width of the features that are compared
        temperature: PositiveFloat = 0.07  # initial temperature of similarities; it is trained
        label_smoothing: Annotated[float, Interval(ge=0, lt=1)] = 0.1  # of contrast and captioning

    options: Options

    def __init__(self, options: Options) -> None:
        super().__init__(options, use_qformer_text_input=True)
        config = self.qformer.config
        width = config.hidden_size
        self.first_token, self.decode_token = (
            options.vocab_size,
            options.vocab_size + 1,
        )  # begin a text to read, to write
        self.words = nn.Embedding(options.vocab_size + 2, width)
        self.places = nn.Embedding(options.max_text_length, width)
        self.image_projection = nn.Linear(width, options.embed_dim)
        self.text_projection = nn.Linear(width, options.embed_dim)
        self.matching = nn.Linear(width, 2)
        self.transform, self.transform_norm = nn.Linear(width, width), nn.LayerNorm(width, config.layer_norm_eps)
        self.word_bias = nn.Parameter(torch.empty(options.vocab_size + 2))  # of the logits; their matrix is `words`
        self.log_temperature = nn.Parameter(torch.empty(1))
        self.vision.requires_grad_(not options.vision.freeze)
        self.weights, self.export = _Weights(self), _Export(self)

    def forward(self, input_ids: Tensor, labels: Tensor, pixel_values: Tensor | None = None, **_: Any) -> Tensor:
        """Return the sum of the three losses, each a mean over the micro batch, times the number of samples.

        input_ids, labels: [batch, length]; the targets of a row are its caption. pixel_values: [batch, 3, H, W].
        """
        count = len(labels)
        if pixel_values is None or len(pixel_values) != count:
            raise DataError("arch: blip2 needs exactly one image per sample")
        ids, seen = self._captions(labels)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.options.vision.freeze):
            patches = self.vision(pixel_values).float()
        queries = self.queries.query_tokens.expand(count, -1, -1)
        answered = self.qformer(queries, encoder_hidden_states=patches).last_hidden_state
        read = self.qformer(self._embedded(ids, self.first_token), 0, seen).last_hidden_state[:, 0]
        images = normalize(self.image_projection(answered).float(), dim=-1)
        texts = normalize(self.text_projection(read).float(), dim=-1)
        # [images, texts]: the similarity of the query that is nearest to the text
        nearest = torch.einsum("iqe,te->itq", images, texts).amax(-1) / self.log_temperature.exp()
        truth, smoothing = torch.arange(count, device=ids.device), self.options.label_smoothing
        contrast = sum(cross_entropy(x, truth, label_smoothing=smoothing) for x in (nearest, nearest.T)) / 2
        losses = {
            "contrast": contrast,
            "matching": self._match(nearest.detach(), patches, ids, seen),
            "captioning": self._caption(patches, ids, seen),
        }
        for name, loss in losses.items():
            self.record(name, loss)
        return count * sum(losses.values(), torch.zeros((), device=ids.device))

    def _captions(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens [batch, length] with room for a first token, and a mask that is 1 where there are tokens."""
        rows = [row[row != IGNORE_INDEX][: self.options.max_text_length - 1] for row in labels]
        ids = nn.utils.rnn.pad_sequence([nn.functional.pad(row, (1, 0)) for row in rows], batch_first=True)
        lengths = torch.tensor([len(row) + 1 for row in rows], device=labels.device)
        return ids, (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]).long()

    def _embedded(self, ids: Tensor, first: int) -> Tensor:
        ids = torch.cat([torch.full_like(ids[:, :1], first), ids[:, 1:]], 1)
        return self.words(ids) + self.places.weight[: ids.shape[1]]

    def _match(self, nearest: Tensor, patches: Tensor, ids: Tensor, seen: Tensor) -> Tensor:
        """Classify pairs as matching or not: each true pair, and one hard negative per text and per image.

        Negatives are drawn in proportion to the softmax of their similarity (Li et al., 2021).
        """
        count = len(ids)
        image, text = torch.arange(count, device=ids.device), torch.arange(count, device=ids.device)
        if count > 1:
            chances = [
                x.softmax(1).fill_diagonal_(0) + 1e-9 * (1 - torch.eye(count)).to(x) for x in (nearest.T, nearest)
            ]
            other_image, other_text = (torch.multinomial(chance, 1)[:, 0] for chance in chances)
            image, text = torch.cat([image, other_image, image]), torch.cat([text, text, other_text])
        queries = self.queries.query_tokens.expand(len(image), -1, -1)
        both = torch.cat([queries, self._embedded(ids[text], self.first_token)], 1)
        mask = torch.cat([seen.new_ones(len(image), queries.shape[1]), seen[text]], 1)
        out = self.qformer(both, queries.shape[1], mask, patches[image]).last_hidden_state[:, : queries.shape[1]]
        logits = self.matching(out).float().mean(1)
        return cross_entropy(logits, (torch.arange(len(image), device=ids.device) < count).long())

    def _caption(self, patches: Tensor, ids: Tensor, seen: Tensor) -> Tensor:
        """Predict each token of the captions; texts see the queries and earlier tokens, queries see only queries."""
        queries = self.queries.query_tokens.expand(len(ids), -1, -1)
        number, length = queries.shape[1], ids.shape[1]
        mask = torch.ones(number + length, number + length, dtype=torch.bool, device=ids.device).tril()
        mask[:number, :number] = True
        both = torch.cat([queries, self._embedded(ids, self.decode_token)], 1)
        if self.qformer.config._attn_implementation == "eager":
            mask = torch.zeros(mask.shape, device=ids.device).masked_fill_(~mask, torch.finfo(torch.float32).min)
        shape = (len(ids), 1, *mask.shape)
        out = self.qformer(both, number, mask.expand(shape), patches).last_hidden_state[:, number:-1]
        hidden = self.transform_norm(gelu(self.transform(out)))
        logits = linear(hidden, self.words.weight).float() + self.word_bias
        targets = ids[:, 1:].masked_fill(seen[:, 1:] == 0, IGNORE_INDEX)
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=self.options.label_smoothing)

    @staticmethod
    def num_targets(batch: Batch) -> int:
        return len(batch["labels"])

    @property
    def predicts_tokens(self) -> bool:
        return False

    @property
    def vocab_size(self) -> int:
        return self.options.vocab_size

    def blocks(self) -> list[nn.Module]:
        return [*self.vision.blocks, *self.qformer.encoder.layer]  # type: ignore[misc]


class _Weights(Weights):
    model: Blip2

    def canonical_name(self, name: str) -> str:
        part, _, rest = name.partition(".")
        return rest if part == "queries" else _PREFIXES[part] + rest if part in _PREFIXES else name

    def initialize(self, name: str, value: Tensor, rng: torch.Generator) -> None:
        """Fill in the initial values of timm and BERT; the temperature is that of the options."""
        options = self.model.options
        if name == "log_temperature":
            value.fill_(options.temperature).log_()
        else:
            weights.initialize(name, value, rng, options, options.qformer.initializer_range)

    def sources(self) -> list[Source]:
        found = self.model.folders
        parts = weights.sources_of_parts(found, _PREFIXES, self.model.width)
        if "model" not in found:
            return parts
        return [*parts, Source(found["model"], lambda name, _: name, of_model=True)]


class _Export(Export):
    model: Blip2

    def save_config(self, folder: Path) -> None:
        write_json(folder / "config.json", {"arch": "blip2", **to_plain(self.model.options)})
