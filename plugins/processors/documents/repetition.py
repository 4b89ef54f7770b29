"""Documents that do not say the same again and again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from crosstrain import Dropped, Filter, Fraction, registry


@registry.register_processor("repetition")
class RepetitionFilter(Filter):
    """Drops documents made of repeated lines, paragraphs or phrases, by the shares of Rae et al. 2021, table A1."""

    @dataclass
    class Options:
        """The largest shares that are kept, from 0 to 1; 1: any."""

        lines: Fraction = 0.3  # of the lines that stand there before already
        paragraphs: Fraction = 0.3  # of the paragraphs that do
        characters_in_lines: Fraction = 0.2  # of all characters, in such lines
        phrase_2: Fraction = 0.2  # of all characters, in the most frequent phrase of two words
        phrase_3: Fraction = 0.18
        phrase_4: Fraction = 0.16

    options: Options

    def text(self, text: str) -> str | Dropped:
        lines = [line for line in text.split("\n") if line.strip()]
        paragraphs = [part for part in text.split("\n\n") if part.strip()]
        shares = {
            "lines": _repeated(lines),
            "paragraphs": _repeated(paragraphs),
            "characters_in_lines": _characters(lines) / max(len(text), 1),
        }
        words = text.split()
        for length in (2, 3, 4):
            shares[f"phrase_{length}"] = min(1.0, _most_frequent(words, length) / max(len(text), 1))
        for name, share in shares.items():
            if share > getattr(self.options, name):
                return Dropped(f"{name} {share:.2f}")
        return text


def _repeated(parts: list[str]) -> float:
    return 1 - len(set(parts)) / len(parts) if parts else 0.0


def _characters(lines: list[str]) -> int:
    """Characters in lines that stand before already."""
    return sum((count - 1) * len(line) for line, count in Counter(lines).items())


def _most_frequent(words: list[str], length: int) -> int:
    """Characters in all places of the most frequent phrase of so many words, which may overlap; 0: none comes twice."""
    phrases = Counter(zip(*(words[k:] for k in range(length)), strict=False))
    phrase, count = max(phrases.items(), key=lambda item: item[1], default=((), 0))
    return count * (sum(map(len, phrase)) + length - 1) if count > 1 else 0
