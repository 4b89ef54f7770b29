"""Incremental detokenization: only whole characters are returned, and the text ends at a stop string."""

from collections.abc import Iterable
from typing import Any

_BROKEN = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Text of a growing token sequence.

    Incomplete characters are held back, and so is text that may be the start of a stop string. The text ends before
    the first stop string. strip: remove leading whitespace.

    `tokenizers.decoders.DecodeStream` cannot replace this class. For byte-fallback tokens that do not form
    valid UTF-8, `DecodeStream` raises an error, or returns text that differs from decoding all tokens at once. Models
    early in training generate such tokens.
    """

    def __init__(self, tokenizer: Any, stops: Iterable[str] = (), strip: bool = False) -> None:
        self._tokenizer, self._stops, self._strip = tokenizer, tuple(stops), strip
        self._ids: list[int] = []
        self._text = ""  # text of all tokens, without an incomplete character at the end
        self._shown = 0
        self.stopped = False  # a stop string was found; the text is complete

    @property
    def text(self) -> str:
        """The text so far; held-back text is included unless a stop string was found."""
        return self._text[: self._shown] if self.stopped else self._decode()

    def push(self, token: int) -> str:
        """Add a token, and return the text that it completes."""
        assert not self.stopped
        self._ids.append(token)
        text = self._decode()
        return "" if text.endswith(_BROKEN) else self._advance(text, last=False)

    def finish(self) -> str:
        """Return the held-back text. Call this after the last token."""
        return "" if self.stopped else self._advance(self._decode(), last=True)

    def _advance(self, text: str, last: bool) -> str:
        # A stop string may start in the held-back text, so the search starts at `_shown`.
        found = [at for stop in self._stops if (at := text.find(stop, self._shown)) >= 0]
        self.stopped = bool(found)
        end = min(found) if found else len(text) if last else len(text) - self._begun(text)
        piece = text[self._shown : end]
        self._text, self._shown = text, max(self._shown, end)
        return piece

    def _begun(self, text: str) -> int:
        """Return the length of the longest suffix of the held-back text that is a prefix of a stop string."""
        most = min(len(text) - self._shown, max(map(len, self._stops), default=0))
        return next((n for n in range(most, 0, -1) if any(s.startswith(text[-n:]) for s in self._stops)), 0)

    def _decode(self) -> str:
        text = self._tokenizer.decode(self._ids)
        return text.lstrip() if self._strip else text
