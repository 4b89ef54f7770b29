"""Pretrained weights of each part: folders, and parameter names in the folders."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Blip2Config, PreTrainedConfig

from crosstrain import ConfigError, Excerpt, LanguageModel, Source, check_source, find_checkpoint, pretrained_folder
from crosstrain.checkpoint.load_weights import open_weights
from crosstrain.checkpoint.manifest import MANIFEST

from . import vision
from .options import QFormer, Vision

VISION, _QUERIES = "vision_model.", "query_tokens"  # canonical names: prefix in the vision transformer, the queries
_RUN, _BLIP2 = "a run of this model", "a Hugging Face BLIP-2 folder"
_KINDS = {"model": (_RUN,), "vision": (_RUN, _BLIP2, ""), "qformer": (_RUN, _BLIP2), "projector": (_RUN,)}


def folders(options: Any) -> dict[str, Path]:
    """Return part -> folder of its pretrained weights; the key `model` is for an earlier run with all parts.

    Raises ConfigError for unsupported folders.
    """
    found = {}
    for part, kinds in _KINDS.items():
        key, given = ("model", options) if part == "model" else (f"model.{part}", getattr(options, part, None))
        if getattr(given, "pretrained", None) is not None:
            check_source(f"the pretrained weights {given.pretrained}")
            path = Path(given.pretrained).expanduser()
            of_a_run = path.is_file() or any((path / name).exists() for name in (MANIFEST, "checkpoints"))
            found[part] = find_checkpoint(path) if of_a_run else pretrained_folder(given.pretrained)
            if _kind(found[part]) not in kinds:
                raise ConfigError(f"{key}.pretrained: {given.pretrained} is not {' or '.join(kinds)}")
    return found


def sized(options: Any, found: dict[str, Path]) -> Any:
    """Return the options with the sizes found in these folders. Raises ConfigError if a given size differs."""
    for part, source in (("vision", "model"), ("vision", "vision"), ("qformer", "model"), ("qformer", "qformer")):
        if source in found:
            given, theirs = getattr(options, part), _sizes(part, found[source])
            for key, value in theirs.items():
                if (mine := getattr(given, key)) not in (None, value):
                    raise ConfigError(
                        f"model.{part}.{key}: {mine} differs from {value} in {found[source]}; set it to {value}"
                    )
            options = replace(options, **{part: replace(given, **theirs)})
    return options


def _kind(folder: Path) -> str:
    """Return the kind of a folder, as in `_KINDS`; an empty string for a timm folder."""
    config, _ = PreTrainedConfig.get_config_dict(folder)
    return (
        _RUN
        if config.get("arch") in ("blip2", "blip2_qwen")
        else _BLIP2
        if config.get("model_type") == "blip-2"
        else ""
    )


def _sizes(part: str, folder: Path) -> dict[str, Any]:
    """Return the options of a part that follow from its weights in a folder."""
    (config, _), kind = PreTrainedConfig.get_config_dict(folder), _kind(folder)
    if kind == _RUN:
        known = ("num_query_tokens", *(Vision if part == "vision" else QFormer).published)
        theirs = {key: value for key, value in config.get(part, {}).items() if key in known}
    elif kind == _BLIP2:
        blip2 = Blip2Config.from_dict(config)
        seen, asked = blip2.vision_config, blip2.qformer_config
        theirs = {"num_query_tokens": blip2.num_query_tokens} | {key: getattr(asked, key) for key in QFormer.published}
        if part == "vision":
            theirs = {
                "image_size": seen.image_size, "patch_size": seen.patch_size, "embed_dim": seen.hidden_size,
                "depth": seen.num_hidden_layers, "num_heads": seen.num_attention_heads,
                "mlp_ratio": seen.intermediate_size / seen.hidden_size,
            }  # fmt: skip
    else:
        theirs = {"encoder": config.get("architecture")}
    return {key: value for key, value in theirs.items() if isinstance(value, (int, float, str))}


def owned(part: str, prefixes: dict[str, str]) -> tuple[str, ...]:
    """Return the prefixes of the canonical names of a part's parameters."""
    return (prefixes[part], _QUERIES) if part == "qformer" else (prefixes[part],)


def sources(found: dict[str, Path], prefixes: dict[str, str], width: int, language: LanguageModel) -> list[Source]:
    """Return the weight sources of all parts, including the language model's own sources.

    prefixes: part -> prefix of canonical names. width: hidden size of the vision transformer.
    """
    out = sources_of_parts(found, prefixes, width)
    out += [_under(prefixes["language_model"], source) for source in language.weights.sources()]
    if (run := found.get("model")) is not None:
        trained, parts = open_weights(run).names("param"), tuple(out)

        def covers(name: str) -> bool:
            """Return False if the earlier run lacks a weight of a new adapter or a weight with a different source."""
            return name in trained or not (".lora_" in name or any(source.covers(name) for source in parts))

        out.insert(0, Source(run, _as_it_is, covers, of_model=True))
    return out


def sources_of_parts(found: dict[str, Path], prefixes: dict[str, str], width: int) -> list[Source]:
    """Return the weight sources of the parts with a folder in `found`; other arguments are those of `sources`."""
    out = []
    for part in (part for part in prefixes if part in found):
        names, kind = owned(part, prefixes), _kind(found[part])
        if part == "vision" and kind != _RUN:
            place = _as_it_is if kind != _BLIP2 else lambda name, _: vision.blip2_place(name, width)
            out.append(_under(prefixes[part], Source(found[part], place)))
        else:
            out.append(Source(found[part], _as_it_is, lambda name, names=names: name.startswith(names)))
    return out


def initialize(name: str, value: Tensor, rng: torch.Generator, options: Any, matrix_std: float) -> None:
    """Fill in initial values: in the vision transformer as timm does, elsewhere as BERT does.

    matrix_std: standard deviation of matrices outside of the vision transformer; the queries have their own.
    """
    if name.startswith(VISION):
        vision.initialize(name.removeprefix(VISION), value, rng, options.vision)
    elif value.ndim > 1:
        value.normal_(0.0, options.qformer.query_std if name == _QUERIES else matrix_std, generator=rng)
    else:
        value.fill_(0.0 if name.endswith("bias") else 1.0)


def keep_matrices_in(dtype: torch.dtype, part: nn.Module) -> None:
    """Store the frozen matrices of linear layers and convolutions in the dtype that autocast converts them to.

    Results stay bitwise equal. Embeddings and norms stay fp32, because their outputs are computed in fp32. Biases
    stay fp32, because some runners' linear layers add biases without rounding.
    """
    looked_up = {module.weight for module in part.modules() if isinstance(module, nn.Embedding)}
    multiplied = {module.weight for module in part.modules() if isinstance(module, (nn.Linear, nn.Conv2d))}
    for weight in multiplied - looked_up:
        if not weight.requires_grad:
            weight.data = weight.data.to(dtype)


def _as_it_is(name: str, _: set[str]) -> str | Excerpt:
    return name


def _under(prefix: str, source: Source) -> Source:
    """Adapt the source of a part to the parameter names of the full model."""
    return Source(
        source.folder,
        lambda name, names: source.place(name.removeprefix(prefix), names),
        lambda name: name.startswith(prefix) and source.covers(name.removeprefix(prefix)),
    )
