"""Encoding with a checkpoint's untrusted tokenizer: prompts are encoded in processes that can be killed.

A tokenizer's regular expression or chat template may run forever or exhaust memory.
"""

import json
import time
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from crosstrain.checkpoint.manifest import read_json
from crosstrain.data.tokenizer import CONFIG, TextTokenizer, load_tokenizer, stored_tokenizer
from crosstrain.utils.assets import GENERATION_CONFIG, end_tokens
from crosstrain.utils.errors import CheckpointError, ConfigError, first_line, sentence
from crosstrain.utils.limited_process import LimitedProcess

Kind = Literal["text", "chat", "words"]
_SECONDS = 4.0  # time limit of one prompt
_SLOW = 1.0  # seconds after which a prompt counts as stuck
_MEMORY = 1 << 29  # memory limit of a process in bytes, in addition to the tokenizer's memory


def open_tokenizer(checkpoint: Path) -> Any:
    """Load a checkpoint's tokenizer for decoding.

    Raises CheckpointError if the tokenizer cannot be loaded or if its decoder is unsafe.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        # AutoTokenizer would open any file and import any class named in the folder.
        tokenizer = PreTrainedTokenizerFast(**stored_tokenizer(checkpoint))
    except Exception as error:  # Python and Rust raise errors of many types
        raise CheckpointError(f"{checkpoint}: its tokenizer cannot be loaded ({first_line(error)})") from error
    check_decoder(tokenizer, checkpoint)
    return tokenizer


def text_encoder(tokenizer: Any) -> LimitedProcess:
    """Return a process that encodes texts without special tokens, as in training."""
    return LimitedProcess(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], "the tokenizer")


def check_stored(checkpoint: Path) -> None:
    """Raise ConfigError unless a tokenizer is stored with the checkpoint."""
    if not (checkpoint / CONFIG).is_file():
        raise ConfigError(
            f"{checkpoint}: has no tokenizer, so it cannot process text; train with a tokenizer "
            f"(datasets.<name>.tokenizer)"
        )


def check_decoder(tokenizer: Any, checkpoint: Path) -> None:
    """Raise CheckpointError unless decoding, which runs in this process, takes time linear in the number of tokens."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    steps = [json.loads(decoder.__getstate__())] if decoder is not None else []
    for step in steps:
        steps += step.get("decoders", [])
        fixed = step.get("pattern", {}).get("String")
        if step["type"] == "Replace" and (fixed is None or len(step["content"]) > len(fixed)):
            raise CheckpointError(
                f"{checkpoint}: its tokenizer's decoder replaces {sentence(step['pattern'])}; it may replace only "
                f"fixed text, and only with text that is not longer"
            )


class Encoders:
    """Processes that encode texts and chats as token IDs.

    Concurrent calls use separate processes, so they do not delay each other. The constructor raises CheckpointError if
    the tokenizer cannot be loaded.
    """

    def __init__(self, checkpoint: Path) -> None:
        check_stored(checkpoint)
        self._checkpoint = checkpoint
        self.tokenizer = open_tokenizer(checkpoint)  # for decoding
        self._idle: list[LimitedProcess] = []
        self._busy: dict[LimitedProcess, float] = {}  # process -> start time of its call

    @property
    def stuck(self) -> int:
        """Number of prompts for which encoding has already taken more than `_SLOW` seconds."""
        return sum(time.monotonic() - since > _SLOW for since in list(self._busy.values()))

    @property
    def ends(self) -> set[int]:
        """The tokens that end an answer: the end-of-text token and the end tokens in generation_config.json."""
        path = self._checkpoint / GENERATION_CONFIG
        settings = read_json(path, most_bytes=1 << 20) if path.exists() else {}
        return {self.tokenizer.eos_token_id} | end_tokens(settings)

    @cached_property
    def _words(self) -> TextTokenizer:
        return load_tokenizer(self._checkpoint)

    def encode(self, kind: Kind, given: Any) -> list[int]:
        """Encode a `text`, a `chat` (with the chat template) or `words` (text without special tokens) as token IDs.

        Raises LimitError if encoding fails or exceeds its time or memory limit.
        """
        try:
            process = self._idle.pop()
        except IndexError:
            process = LimitedProcess(self._encode, "", memory=_MEMORY, seconds=_SECONDS, urgent=True)
        process.name = "the tokenizer or its chat template" if kind == "chat" else "the tokenizer"
        self._busy[process] = time.monotonic()
        try:
            return process((kind, given))
        finally:
            del self._busy[process]
            self._idle.append(process)

    def _encode(self, asked: tuple[Kind, Any]) -> list[int]:
        kind, given = asked
        if kind == "words":
            return self._words.compute([given])[0].tolist()
        if kind == "chat":
            given = self.tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True)
        return [-1 if i is None else i for i in self.tokenizer(given, add_special_tokens=False)["input_ids"]]

    def close(self) -> None:
        """End all processes."""
        for process in [*self._idle, *self._busy]:
            process.close()
