"""BLIP-2 checkpoints of LAVIS: names and shapes of their tensors, and the corresponding names of the `blip2` model."""

import re
from pathlib import Path
from typing import Any

import torch

from crosstrain import DataError, first_line, write_json
from crosstrain.checkpoint.files import write_safetensors

from ..prepare.prepare import new_folder

_CLS = 101  # BERT's token at the beginning of a text
_SPECIAL = 2  # rows of `words` for the first tokens of texts to read and to write
# Patterns of LAVIS's names -> names of the model `blip2`; the projection belongs to `blip2_qwen`.
_NAMES = {
    r"query_tokens": "query_tokens",
    r"visual_encoder\.(.+)": r"vision_model.\1",
    r"ln_vision\.(weight|bias)": r"vision_model.norm.\1",
    r"Qformer\.bert\.embeddings\.LayerNorm\.(weight|bias)": r"qformer.layernorm.\1",
    r"Qformer\.bert\.embeddings\.word_embeddings\.weight": "words.weight",
    r"Qformer\.bert\.embeddings\.position_embeddings\.weight": "places.weight",
    r"Qformer\.bert\.(encoder\.layer\.\d+\.(?:cross)?attention)\.self\.(.+)": r"qformer.\1.attention.\2",
    r"Qformer\.bert\.(encoder\.layer\.\d+\..+)": r"qformer.\1",
    r"Qformer\.cls\.predictions\.transform\.dense\.(weight|bias)": r"transform.\1",
    r"Qformer\.cls\.predictions\.transform\.LayerNorm\.(weight|bias)": r"transform_norm.\1",
    r"Qformer\.cls\.predictions\.bias": "word_bias",
    r"vision_proj\.(weight|bias)": r"image_projection.\1",
    r"text_proj\.(weight|bias)": r"text_projection.\1",
    r"itm_head\.(weight|bias)": r"matching.\1",
    r"temp": "log_temperature",
    r"(?:opt|llm|t5)_proj\.(weight|bias)": r"language_projection.\1",
}
# Buffers, and tensors that are tied to others: these must be equal.
_COPIES = {
    "Qformer.bert.embeddings.position_ids": None,
    "Qformer.cls.predictions.decoder.weight": "Qformer.bert.embeddings.word_embeddings.weight",
    "Qformer.cls.predictions.decoder.bias": "Qformer.cls.predictions.bias",
}
_LANGUAGE = re.compile(r"(opt|llm|t5)_model\.")


def convert(given: tuple[Path, Path]) -> tuple[int, list[str]]:
    """Convert the file (first) to a folder (second); return the number of tensors and the options that can use it.

    Raises DataError unless the file is a checkpoint of LAVIS's BLIP-2 in which every tensor is known.
    """
    source, output = given
    try:
        content: Any = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling may raise anything
        raise DataError(f"{source}: torch cannot read its tensors safely ({first_line(error)[:300]})") from None
    state = content.get("model", content) if isinstance(content, dict) else {}
    found = renamed({name: value for name, value in state.items() if isinstance(value, torch.Tensor)}, source)
    if with_text := "words.weight" in found:
        _arrange_words(found)
    with new_folder(output) as folder:
        write_safetensors(folder / "model.safetensors", {k: v.float().contiguous() for k, v in found.items()})
        write_json(folder / "config.json", _config(found, with_text))
    parts = {"vision_model": "model.vision", "qformer": "model.qformer", "language_projection": "model.projector"}
    return len(found), [option for prefix, option in parts.items() if any(n.startswith(prefix) for n in found)]


def renamed(state: dict[str, torch.Tensor], source: Path) -> dict[str, torch.Tensor]:
    """Return the tensors under the names of `blip2`. Raises DataError for unknown tensors, and if there are none."""
    found, unknown = dict[str, torch.Tensor](), list[str]()
    for name, value in state.items():
        new = next((re.sub(p, to, name) for p, to in _NAMES.items() if re.fullmatch(p, name)), None)
        if name in _COPIES:
            tied = _COPIES[name]
            if tied is not None and not torch.equal(value, state[tied]):
                raise DataError(f"{source}: {name} differs from {tied}, to which it should be tied")
        elif new is not None:
            found[new] = value
        elif not _LANGUAGE.match(name):
            unknown.append(name)
    if unknown or "query_tokens" not in found:
        what = f"has unknown tensors: {', '.join(sorted(unknown)[:5])}" if unknown else "has no query_tokens"
        raise DataError(f"{source} is not a BLIP-2 checkpoint of LAVIS: it {what}")
    return found


def _arrange_words(found: dict[str, torch.Tensor]) -> None:
    """Move the rows of [CLS] and [DEC], LAVIS's additional last token, to the end; the bias of [CLS] is unused."""
    for name in {"words.weight", "word_bias"} & found.keys():
        rows = found[name]
        found[name] = torch.cat([rows[:-1], rows[_CLS : _CLS + 1], rows[-1:]])
    if "log_temperature" in found:
        found["log_temperature"] = found["log_temperature"].float().reshape(1).log()


def _config(found: dict[str, torch.Tensor], with_text: bool) -> dict[str, Any]:
    """Return the options of the model, as far as they follow from shapes; BERT and EVA have heads of 64 and 88."""

    def count(pattern: str) -> int:
        return 1 + max((int(m[1]) for name in found if (m := re.match(pattern, name))), default=-1)

    width, layers = found["query_tokens"].shape[2], count(r"qformer\.encoder\.layer\.(\d+)\.")
    crossing = r"qformer\.encoder\.layer\.(\d+)\.crossattention"
    steps = sorted({int(m[1]) for name in found if (m := re.match(crossing, name))})
    qformer = {
        "num_query_tokens": found["query_tokens"].shape[1], "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, width // 64),
        "intermediate_size": len(found["qformer.encoder.layer.0.intermediate_query.dense.bias"]),
        "cross_attention_frequency": steps[1] - steps[0] if len(steps) > 1 else layers,
    }  # fmt: skip
    config: dict[str, Any] = {"arch": "blip2_qwen", "qformer": qformer}
    if (patches := found.get("vision_model.patch_embed.proj.weight")) is not None:
        side, sides = patches.shape[-1], found["vision_model.pos_embed"].shape[1] - 1
        config["vision"] = {
            "encoder": "eva_giant_patch14_224", "image_size": int(sides**0.5) * side, "patch_size": side,
            "embed_dim": len(patches), "depth": count(r"vision_model\.blocks\.(\d+)\."),
            "num_heads": max(1, len(patches) // 88),
            "mlp_ratio": len(found["vision_model.blocks.0.mlp.fc1.bias"]) / len(patches),
        }  # fmt: skip
    if with_text:
        config |= {
            "arch": "blip2", "vocab_size": len(found["words.weight"]) - _SPECIAL,
            "max_text_length": len(found["places.weight"]),
        }  # fmt: skip
    if "image_projection.weight" in found:
        config["embed_dim"] = len(found["image_projection.weight"])
    return config
