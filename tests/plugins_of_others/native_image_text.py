"""Image-text models of transformers as they are, and a dataset around their processor."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from crosstrain import (
    IGNORE_INDEX,
    ConfigError,
    DataError,
    Dataset,
    FilePath,
    OptionError,
    PositiveInt,
    Sample,
    Split,
    Text,
    TransformersModel,
    build_transformers,
    check_source,
    open_image_file,
    pretrained_folder,
    registry,
)


@registry.register_model("native_image_text")
class ImageText(TransformersModel):
    """Any model of transformers' AutoModelForImageTextToText: LLaVA, Qwen2-VL and many more."""

    @dataclass
    class Options:
        """The model is given by `config` or `pretrained`."""

        pretrained: Text | None = None  # a Hugging Face name or folder to start from
        config: dict[str, Any] = field(default_factory=dict)  # of transformers, with model_type
        make_vocab_size_divisible_by: PositiveInt = 1  # embedding rows are padded to this

        def __post_init__(self) -> None:
            if (self.pretrained is None) == ("model_type" not in self.config):
                raise OptionError(
                    "config", "needs a transformers configuration with its model_type, unless pretrained is set"
                )

    def __init__(self, options: Options) -> None:
        source = pretrained_folder(options.pretrained) if options.pretrained else None
        config = AutoConfig.from_pretrained(source) if source else AutoConfig.for_model(**options.config)
        try:
            lm = build_transformers(AutoModelForImageTextToText, config, options.make_vocab_size_divisible_by)
        except KeyError as error:
            name = type(config).__name__
            raise ConfigError(f"model.config: transformers has no image-text model of {name}") from error
        except (TypeError, ValueError) as error:
            raise ConfigError(f"model.config: transformers cannot build a model from it ({error})") from error
        super().__init__(options, config, lm, source)


@registry.register_dataset("image_text_rows")
class ImageTextRows(Dataset):
    """Rows {"image": file, "prompt": text, "answer": text} of a JSON Lines file; the answers are the targets."""

    @dataclass
    class Options:
        """Images are relative to the file's folder."""

        path: FilePath
        processor: Text  # a folder with transformers' processor
        seq_length: PositiveInt  # tokens of a sample, those of its image included

    def __init__(self, options: Options, split: Split) -> None:
        super().__init__(options, split)
        self.folder = Path(options.path).parent
        self.rows = [json.loads(line) for line in Path(options.path).read_text().splitlines()]
        check_source(f"the processor {options.processor}")
        self.processor = AutoProcessor.from_pretrained(options.processor)
        self.tokenizer_path, self.sequence_length = Path(options.processor), options.seq_length
        self.end: str = self.processor.tokenizer.eos_token
        self.vocab_size = len(self.processor.tokenizer)

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, index: int, rng: np.random.Generator) -> Sample:
        row, length = self.rows[index], self.options.seq_length
        image = open_image_file(self.folder / row["image"])
        whole = self._processed(image, row["prompt"] + row["answer"] + self.end)
        ids = whole.pop("input_ids")[0]
        prompt = self._processed(image, row["prompt"])["input_ids"].shape[1]
        if len(ids) > length + 1:
            raise DataError(f"{self.location(index)}: {len(ids)} tokens do not fit seq_length={length}")
        # The target at a position is the token after it. Padding comes last, where causal attention does not see it.
        labels = np.full(length, IGNORE_INDEX)
        labels[prompt - 1 : len(ids) - 1] = ids[prompt:]
        padded = np.full(length, self.processor.tokenizer.pad_token_id)
        padded[: len(ids) - 1] = ids[:-1]
        return {"input_ids": padded, "labels": labels} | {key: value[0] for key, value in whole.items()}

    def _processed(self, image: Image.Image, text: str) -> dict[str, np.ndarray]:
        """The processor's fields without a mask, which causal attention does not need."""
        fields = dict(self.processor(images=image, text=text, return_tensors="np"))
        return {key: value for key, value in fields.items() if key not in ("attention_mask", "mm_token_type_ids")}

    def location(self, index: int) -> str:
        return f"{self.options.path}:{index + 1}"
