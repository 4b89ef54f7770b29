"""Tiny image-text models of ten families, with processors in the published layouts."""

# ruff: noqa: E501 - templates
from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = [
    "<|endoftext|>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>", "<|video_pad|>", "<image>", "<video>", "<img>", "</img>", "<IMG_CONTEXT>", "<start_of_image>",
    "<end_of_image>", "<image_soft_token>", "<start_of_turn>", "<end_of_turn>", "<fake_token_around_image>",
    "<global-img>", "<end_of_utterance>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]",
    *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)),
]  # fmt: skip
_PARTS = "{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{{% for part in m.content %}}{{% if part.type == 'image' %}}{image}{{% elif part.type == 'video' %}}{video}{{% else %}}{{{{ part.text }}}}{{% endif %}}{{% endfor %}}{{% endif %}}"


def _chatml(image: str, video: str = "") -> str:
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        + _PARTS.format(image=image, video=video)
        + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


_GEMMA = (
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    + _PARTS.format(image="<start_of_image>", video="")
    + "<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_SMOLVLM = (
    "<|im_start|>{% for m in messages %}{{ m.role | capitalize }}:{% if m.content[0].type != 'image' %} {% endif %}{% for part in m.content %}{% if part.type == 'image' %}<image>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
_MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST]" + _PARTS.format(image="[IMG]", video="") + "[/INST]"
    "{% else %}" + _PARTS.format(image="", video="") + "</s>{% endif %}{% endfor %}"
)
_PALIGEMMA = (
    "{% for m in messages %}{% if m.role == 'user' %}{% for part in m.content %}{% if part.type == 'image' %}<image>{% endif %}{% endfor %}"
    "<s>{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{{ '\n' }}"
    "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}</s>{% endif %}{% endfor %}"
)
_TEXT: dict[str, Any] = {
    "vocab_size": 400, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2,
    "head_dim": 8,
}  # fmt: skip
_SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
FAMILIES = [
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llava_onevision", "internvl", "gemma3", "smolvlm",
    "paligemma", "mistral3",
]  # fmt: skip
# Family -> token that ends a turn in its template; <|im_end|> in the others.
ENDS = {"gemma3": "<end_of_turn>", "idefics3": "<end_of_utterance>", "paligemma": "</s>", "mistral3": "</s>"}


def write_tokenizer(names: dict[str, str] | None = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the special tokens of all families; `names`: attributes of the tokenizer -> tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=380, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["what colour is the circle? red green blue\n"] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", extra_special_tokens=names or {},
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def write_family(family: str, folder: Path) -> dict[str, Any]:
    """Write a processor into `folder`; return the model's configuration for transformers."""
    tokenizer = write_tokenizer()
    ids = tokenizer.convert_tokens_to_ids
    made: Any
    if family.startswith("qwen"):
        images = transformers.Qwen2VLImageProcessor(
            patch_size=4, merge_size=2, min_pixels=8 * 8, max_pixels=32 * 32, temporal_patch_size=2
        )
        kind = {
            "qwen2_vl": transformers.Qwen2VLProcessor, "qwen2_5_vl": transformers.Qwen2_5_VLProcessor,
            "qwen3_vl": transformers.Qwen3VLProcessor, "qwen3_vl_moe": transformers.Qwen3VLProcessor,
        }[family]  # fmt: skip
        videos = (
            transformers.Qwen3VLVideoProcessor if family.startswith("qwen3") else transformers.Qwen2VLVideoProcessor
        )(patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 256, "longest_edge": 4096})
        made = kind(
            images,
            tokenizer,
            videos,
            chat_template=_chatml(*(f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))),
        )
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
        vision = {
            "qwen2_vl": {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4},
            "qwen2_5_vl": {
                "depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4, "window_size": 16,
                "out_hidden_size": 32, "fullatt_block_indexes": [1],
            },
        }.get(family, {
            "depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4,
            "out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
        })  # fmt: skip
        dropped = {"bos_token_id", "eos_token_id"} if family.startswith("qwen3") else {"head_dim"}
        text = {key: value for key, value in _TEXT.items() if key not in dropped}
        if family == "qwen3_vl_moe":
            text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        if family.startswith("qwen3"):
            rope |= {"mrope_interleaved": True}
        config = {
            "text_config": text | {"rope_parameters": rope}, "vision_config": vision,
            "image_token_id": ids("<|image_pad|>"), "video_token_id": ids("<|video_pad|>"),
            "vision_start_token_id": ids("<|vision_start|>"), "vision_end_token_id": ids("<|vision_end|>"),
        }  # fmt: skip
    elif family == "llava_onevision":
        images = transformers.LlavaOnevisionImageProcessor(
            size={"height": 28, "width": 28}, image_grid_pinpoints=[[28, 28], [28, 56], [56, 28]]
        )
        made = transformers.LlavaOnevisionProcessor(
            images, tokenizer, transformers.LlavaOnevisionVideoProcessor(size={"height": 28, "width": 28}),
            num_image_tokens=4, vision_feature_select_strategy="full", chat_template=_chatml("<image>\n", "<video>\n"),
        )  # fmt: skip
        config = {
            "text_config": {"model_type": "qwen2", **_TEXT}, "vision_config": _SIGLIP, "image_grid_pinpoints": [[28, 28], [28, 56], [56, 28]],
            "image_token_index": ids("<image>"), "image_token_id": ids("<image>"), "video_token_index": ids("<video>"), "video_token_id": ids("<video>"),
            "vision_feature_select_strategy": "full",
        }  # fmt: skip
    elif family == "internvl":
        names = {
            "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        }  # fmt: skip
        tokenizer = write_tokenizer(names)
        images = transformers.GotOcr2ImageProcessor(size={"height": 16, "width": 16}, max_patches=3, min_patches=1)
        made = transformers.InternVLProcessor(
            images, tokenizer, transformers.InternVLVideoProcessor(size={"height": 16, "width": 16}), image_seq_length=4,
            chat_template=_chatml("<IMG_CONTEXT>\n", "<video>\n"),
        )  # fmt: skip
        config = {
            "text_config": {"model_type": "qwen2", **_TEXT},
            "vision_config": {
                "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
                "image_size": [16, 16], "patch_size": [4, 4],
            },
            "image_token_id": ids("<IMG_CONTEXT>"),
        }  # fmt: skip
    elif family == "gemma3":
        names = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
        tokenizer = write_tokenizer(names)
        images = transformers.Gemma3ImageProcessor(size={"height": 28, "width": 28})
        made = transformers.Gemma3Processor(images, tokenizer, image_seq_length=4, chat_template=_GEMMA)
        config = {
            "text_config": {**_TEXT, "sliding_window": 16}, "vision_config": _SIGLIP, "mm_tokens_per_image": 4,
            "image_token_index": ids("<image_soft_token>"), "boi_token_index": ids("<start_of_image>"), "eoi_token_index": ids("<end_of_image>"),
        }  # fmt: skip
    elif family == "smolvlm":
        images = transformers.Idefics3ImageProcessor(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
        made = transformers.Idefics3Processor(images, tokenizer, image_seq_len=1, chat_template=_SMOLVLM)
        vision = {key: value for key, value in _SIGLIP.items() if key not in ("model_type", "vision_use_head")}
        config = {
            "text_config": {"model_type": "llama", **_TEXT}, "vision_config": vision, "scale_factor": 2,
            "image_token_id": ids("<image>"),
        }  # fmt: skip
        return {"model_type": "idefics3", **config} if made.save_pretrained(folder) is not False else {}
    elif family == "paligemma":
        images = transformers.SiglipImageProcessor(size={"height": 28, "width": 28})
        images.image_seq_length = 4
        tokenizer = write_tokenizer({"image_token": "<image>"})
        made = transformers.PaliGemmaProcessor(images, tokenizer, chat_template=_PALIGEMMA)
        config = {
            "text_config": {"model_type": "gemma", **_TEXT, "vocab_size": 2000}, "vision_config": {**_SIGLIP, "projection_dim": 32},
            "image_token_index": ids("<image>"), "projection_dim": 32, "hidden_size": 32,
        }  # fmt: skip
    else:
        images = transformers.PixtralImageProcessor(size={"longest_edge": 56}, patch_size=14)
        made = transformers.PixtralProcessor(
            images, tokenizer, patch_size=7, spatial_merge_size=2, chat_template=_MISTRAL
        )
        config = {
            "text_config": {"model_type": "mistral", **_TEXT, "sliding_window": None},
            "vision_config": {
                "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
                "num_attention_heads": 2, "image_size": 56, "patch_size": 7,
            },
            "image_token_index": ids("[IMG]"), "spatial_merge_size": 2,
        }  # fmt: skip
    made.save_pretrained(folder)
    return {"model_type": family, **config}
