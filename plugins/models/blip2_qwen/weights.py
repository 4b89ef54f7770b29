"""Pretrained weights of each part: their folders, and their names there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig

from crosstrain import ConfigError, Excerpt, LanguageModel, Source, check_source, pretrained_folder
from crosstrain.checkpoint.folders import find_checkpoint

from . import vision
from .options import Projector, QFormer, Vision

_QUERIES = "query_tokens"


def folders(encoder: Vision, qformer: QFormer, projector: Projector) -> dict[str, Path]:
    """Folders of pretrained weights by part; ConfigError for a folder of another kind."""
    found = {}
    if encoder.pretrained is not None:
        found["vision"] = pretrained_folder(encoder.pretrained)
    if qformer.pretrained is not None:
        found["qformer"] = pretrained_folder(qformer.pretrained)
        if not _is_blip2(found["qformer"]):
            raise ConfigError(f"model.qformer.pretrained: {qformer.pretrained} is not a Hugging Face BLIP-2 folder")
    if projector.pretrained is not None:
        check_source(f"the checkpoint {projector.pretrained}")
        found["projector"] = find_checkpoint(Path(projector.pretrained).expanduser())
    return found


def _is_blip2(folder: Path) -> bool:
    return PreTrainedConfig.get_config_dict(folder)[0].get("model_type") == "blip-2"


def sources(found: dict[str, Path], prefixes: dict[str, str], width: int, language: LanguageModel) -> list[Source]:
    """Sources of all parts, the language model's own included.

    prefixes: of the parts' canonical names. width: the vision transformer's.
    """
    out = []
    for part, folder in found.items():
        owned = (prefixes[part], _QUERIES) if part == "qformer" else (prefixes[part],)
        place: Callable[[str, set[str]], str | Excerpt] = _as_it_is
        if part == "vision":
            place = _blip2(prefixes[part], width) if _is_blip2(folder) else _without(prefixes[part])
        out.append(Source(folder, place, lambda name, owned=owned: name.startswith(owned)))
    prefix = prefixes["language_model"]
    for source in language.pretrained_sources():
        out.append(_under(prefix, source))
    return out


def keep_matrices_in(dtype: torch.dtype, part: nn.Module) -> None:
    """Store the frozen matrices of linear maps and convolutions in the dtype that autocast would convert them to.

    Results are the same to the bit. Embeddings and norms, which are read in fp32, stay as they are, and so do biases,
    which not every runner's linear map rounds before it adds them.
    """
    looked_up = {module.weight for module in part.modules() if isinstance(module, nn.Embedding)}
    for module in part.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            weight = module.weight
            if not weight.requires_grad and weight not in looked_up:
                weight.data = weight.data.to(dtype)


def _as_it_is(name: str, _: set[str]) -> str:
    return name


def _without(prefix: str) -> Callable[[str, set[str]], str]:
    return lambda name, _: name.removeprefix(prefix)


def _blip2(prefix: str, width: int) -> Callable[[str, set[str]], str | Excerpt]:
    return lambda name, _: vision.blip2_place(name.removeprefix(prefix), width)


def _under(prefix: str, source: Source) -> Source:
    """A language model's source, by its parameters' names in the whole model."""

    def covers(name: str) -> bool:
        return name.startswith(prefix) and source.covers(name.removeprefix(prefix))

    return Source(source.folder, lambda name, names: source.place(name.removeprefix(prefix), names), covers)
