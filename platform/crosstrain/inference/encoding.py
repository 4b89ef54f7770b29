"""A checkpoint's tokenizer, which a stranger may have made: prompts are encoded in processes that can be killed.

A regular expression of a tokenizer and a chat template may never end, or take all memory.
"""

import json
import time
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from crosstrain.checkpoint.manifest import read_json
from crosstrain.data.tokenizer import CONFIG, TextTokenizer, load_tokenizer, stored_tokenizer
from crosstrain.utils.assets import GENERATION_CONFIG, end_tokens
from crosstrain.utils.errors import CheckpointError, ConfigError, UserError, first_line, sentence
from crosstrain.utils.limited_process import LimitedProcess, LimitError, TooLate

Kind = Literal["text", "chat", "words"]
_SECONDS = 4.0  # for one prompt
_SLOW = 1.0  # seconds after which a prompt counts as stuck
_MEMORY = 1 << 29  # bytes that a process may take beyond the tokenizer


class EncodingError(UserError):
    """A prompt that has no token ids."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code  # as in the server's errors; "busy": the same prompt may be encoded later


def open_tokenizer(checkpoint: Path) -> Any:
    """The tokenizer of a checkpoint, to decode with. CheckpointError where it cannot be loaded or lets text grow."""
    from transformers import PreTrainedTokenizerFast

    try:
        # Not AutoTokenizer, which opens whatever files and imports whatever class the folder's own files name.
        tokenizer = PreTrainedTokenizerFast(**stored_tokenizer(checkpoint))
    except Exception as error:  # of many kinds, from Python and from Rust
        raise CheckpointError(f"{checkpoint}: its tokenizer cannot be loaded ({first_line(error)})") from error
    check_decoder(tokenizer, checkpoint)
    return tokenizer


def check_stored(checkpoint: Path) -> None:
    """ConfigError unless a tokenizer is stored with the checkpoint."""
    if not (checkpoint / CONFIG).is_file():
        raise ConfigError(
            f"{checkpoint}: no tokenizer is stored with it, so text is not possible; train with one "
            f"(datasets.<name>.tokenizer)"
        )


def check_decoder(tokenizer: Any, checkpoint: Path) -> None:
    """CheckpointError unless decoding takes time in proportion to the tokens: it has no process of its own."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    steps = [json.loads(decoder.__getstate__())] if decoder is not None else []
    for step in steps:
        steps += step.get("decoders", [])
        fixed = step.get("pattern", {}).get("String")
        if step["type"] == "Replace" and (fixed is None or len(step["content"]) > len(fixed)):
            raise CheckpointError(
                f"{checkpoint}: its tokenizer's decoder replaces {sentence(step['pattern'])}; only a fixed text may be "
                f"replaced, by one that is no longer"
            )


class Encoders:
    """Processes that turn texts and chats into token ids. Every call has one to itself, so that none delays another.

    Raises CheckpointError where the tokenizer cannot be loaded, in little time.
    """

    def __init__(self, checkpoint: Path) -> None:
        check_stored(checkpoint)
        self._checkpoint = checkpoint
        self.tokenizer = open_tokenizer(checkpoint)  # to decode with
        self._idle: list[LimitedProcess] = []
        self._busy: dict[LimitedProcess, float] = {}  # since when

    @property
    def stuck(self) -> int:
        """Number of prompts whose encoding takes unusually long."""
        return sum(time.monotonic() - since > _SLOW for since in list(self._busy.values()))

    def ends(self, tokenizer: Any) -> set[int]:
        """Tokens that end an answer: the tokenizer's end of text, and those of the model's generation_config.json."""
        path = self._checkpoint / GENERATION_CONFIG
        settings = read_json(path, most_bytes=1 << 20) if path.exists() else {}
        return {tokenizer.eos_token_id} | end_tokens(settings)

    @cached_property
    def _words(self) -> TextTokenizer:
        return load_tokenizer(self._checkpoint)

    def encode(self, kind: Kind, given: Any) -> list[int]:
        """Token ids of a text; of a chat, by the tokenizer's template; or of words, in which no token is special.

        Raises EncodingError for any error, and for what takes too long or too much memory.
        """
        try:
            process = self._idle.pop()
        except IndexError:
            process = LimitedProcess(self._encode, "", memory=_MEMORY, seconds=_SECONDS, urgent=True)
        process.name = "the tokenizer or its chat template" if kind == "chat" else "the tokenizer"
        self._busy[process] = time.monotonic()
        try:
            ids = process((kind, given))
        except LimitError as error:
            code = "encoding_timeout" if isinstance(error, TooLate) else "encoding_failed"
            raise EncodingError(str(error), code) from None
        except OSError as error:
            raise EncodingError(f"no process can encode ({error}); try again later", "busy") from None
        finally:
            del self._busy[process]
        self._idle.append(process)
        if isinstance(ids, str):
            problem = "the chat template refuses them" if kind == "chat" else "the tokenizer fails"
            raise EncodingError(f"{problem} ({ids})")
        return ids

    def _encode(self, asked: tuple[Kind, Any]) -> list[int] | str:
        """Token ids, or the reason why there are none, in a process with limits."""
        kind, given = asked
        try:
            if kind == "words":
                return self._words.compute([given])[0].tolist()
            if kind == "chat":
                given = self.tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True)
            return [-1 if i is None else i for i in self.tokenizer(given, add_special_tokens=False)["input_ids"]]
        except Exception as error:  # of jinja, the tokenizer, or whatever the template raises
            return first_line(error)[:1000]

    def close(self) -> None:
        """End every process."""
        for process in [*self._idle, *self._busy]:
            process.close()
