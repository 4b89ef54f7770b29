"""GGUF files of llama.cpp: a Hugging Face folder with their weights, configuration and tokenizer."""

from collections import Counter
from pathlib import Path

import torch

from crosstrain import DataError, explained

from ..prepare.prepare import new_folder

_EXACT = ("F32", "F16", "BF16")


def convert_gguf(given: tuple[Path, Path]) -> tuple[int, str]:
    """Write a folder; return the number of tensors and a sentence about their precision.

    transformers reads the file, and multiplies quantized values out to fp32. Raises DataError if it cannot.
    """
    source, folder = given
    with explained(f"{source}: transformers cannot read it", DataError):
        from gguf import GGUFReader
        from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

        types = Counter(tensor.tensor_type.name for tensor in GGUFReader(source).tensors)
        read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        kind: type[PreTrainedConfig] = type(read.config)
        plain = {k: v for k, v in read.config.to_dict().items() if k != "quantization_config" and not k.startswith("_")}
        model = AutoModelForCausalLM.from_config(kind(**plain))  # without the hooks of quantized models
        model.load_state_dict(read.state_dict())
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    with new_folder(folder) as written:
        model.save_pretrained(written)
        tokenizer.save_pretrained(written)
    quantized = {name: count for name, count in types.items() if name not in _EXACT}
    parts = ", ".join(f"{count} in {name}" for name, count in sorted(quantized.items()))
    lost = f"{sum(quantized.values())} are quantized ({parts}), so they are only near the original weights"
    return types.total(), lost if quantized else "none is quantized"
