"""GGUF files of llama.cpp: a Hugging Face folder with their weights, configuration and tokenizer."""

import json
import sys
from collections import Counter
from pathlib import Path

import torch

from crosstrain import DataError, LimitedProcess, cache_folder, explained, registry, require, sentence, write_json
from crosstrain.config.pretrained_folder import NOTE
from crosstrain.data.tokenizer import TOKENIZER

from ..prepare.prepare import new_folder, output_lock
from ..prepare.shards import file_state, key_of

_FORMAT = 1  # version of the folders in the cache; changing it converts all files again
_EXACT = ("F32", "F16", "BF16")


@registry.register_converter("gguf")
def converted(file: Path) -> Path:
    """Return the folder in the cache with the weights and the tokenizer of a GGUF file; create it if it is absent."""
    folder = cache_folder("gguf") / key_of(_FORMAT, file_state(file.resolve()))[:16]
    with output_lock(folder, wait=True):
        if not folder.exists():
            print(sentence(f"note: {file} is converted once into {folder}"), file=sys.stderr, flush=True)
            convert_gguf(file, folder)
    return folder


def convert_gguf(file: Path, folder: Path) -> str:
    """Write a folder, in a process with limits; return the number of tensors and their precision, for a sentence.

    transformers reads the file, and multiplies quantized values out to fp32. Raises DataError if it cannot.
    """
    require("gguf", str(file))
    memory = 20 * ((1 << 30) + 3 * file.stat().st_size)  # 4 bits become 32, as read and as written
    what, advice = f"converting {file}", "check the file"
    return LimitedProcess(_convert, what, memory=memory, seconds=1800.0, advice=advice)((file, folder))


def _convert(given: tuple[Path, Path]) -> str:
    source, folder = given
    advice = "check that it is a whole GGUF file of a language model, or use its Hugging Face folder"
    with explained(f"{source}: transformers cannot read it; {advice}", DataError):
        from gguf import GGUFReader
        from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # a forked process shares the lock of the bars, which could then never be free
        types = Counter(tensor.tensor_type.name for tensor in GGUFReader(source).tensors)
        read, found = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.float32, output_loading_info=True
        )
        if lacking := sorted(found["missing_keys"]):
            raise ValueError(f"it has no {lacking[0]}")
        kind: type[PreTrainedConfig] = type(read.config)
        plain = {k: v for k, v in read.config.to_dict().items() if k != "quantization_config" and not k.startswith("_")}
        model = AutoModelForCausalLM.from_config(kind(**plain))  # without the hooks of quantized models
        model.load_state_dict(read.state_dict())
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    quantized = {name: count for name, count in types.items() if name not in _EXACT}
    parts = ", ".join(f"{count} in {name}" for name, count in sorted(quantized.items()))
    lost = f"{sum(quantized.values())} are quantized ({parts}), so they are only near the original weights"
    said = f"{types.total()} tensors of {source}; {lost if quantized else 'none is quantized'}"
    with new_folder(folder) as written:
        model.save_pretrained(written)
        tokenizer.save_pretrained(written)
        state = json.loads((written / TOKENIZER).read_bytes())
        # transformers adds GPT-2's <|endoftext|> to every vocabulary without it, but the model has no such row
        state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < model.config.vocab_size]
        write_json(written / TOKENIZER, state)
        (written / NOTE).write_text(f"from the {said}\n", encoding="utf-8")
    return said
