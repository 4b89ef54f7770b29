"""Incremental detokenization: whole characters only, up to a stop string."""

from collections.abc import Iterable
from typing import Any

_BROKEN = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Text of a growing token sequence.

    Holds back bytes that are not yet a whole character, and what may be the beginning of one of `stops`: the text ends
    before the first of these. With `strip`, blanks at the beginning are left out.

    `tokenizers.decoders.DecodeStream` is no substitute: under byte fallback it raises, or gives other text than
    decoding everything does, where bytes are no UTF-8, as a model that is still learning generates them.
    """

    def __init__(self, tokenizer: Any, stops: Iterable[str] = (), strip: bool = False) -> None:
        self._tokenizer, self._stops, self._strip = tokenizer, tuple(stops), strip
        self._ids: list[int] = []
        self._text = ""  # of all tokens, but for bytes that are not yet a character
        self._shown = 0
        self.stopped = False  # a stop string was found; the text is at its end

    @property
    def text(self) -> str:
        """The text so far, including what is held back unless a stop string came."""
        return self._text[: self._shown] if self.stopped else self._decode()

    def push(self, token: int) -> str:
        """Add a token; returns the text that it completes."""
        assert not self.stopped
        self._ids.append(token)
        text = self._decode()
        return "" if text.endswith(_BROKEN) else self._advance(text, last=False)

    def finish(self) -> str:
        """Return what was held back, because no token follows."""
        return "" if self.stopped else self._advance(self._decode(), last=True)

    def _advance(self, text: str, last: bool) -> str:
        # A stop string may begin in what was held back, which is everything from `_shown` on.
        found = [at for stop in self._stops if (at := text.find(stop, self._shown)) >= 0]
        self.stopped = bool(found)
        end = min(found) if found else len(text) if last else len(text) - self._begun(text)
        piece = text[self._shown : end]
        self._text, self._shown = text, max(self._shown, end)
        return piece

    def _begun(self, text: str) -> int:
        """Length of the longest suffix of `text`, not yet shown, that a stop string begins with."""
        most = min(len(text) - self._shown, max(map(len, self._stops), default=0))
        return next((n for n in range(most, 0, -1) if any(s.startswith(text[-n:]) for s in self._stops)), 0)

    def _decode(self) -> str:
        text = self._tokenizer.decode(self._ids)
        return text.lstrip() if self._strip else text
