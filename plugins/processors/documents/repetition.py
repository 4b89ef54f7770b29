"""Drop documents with repeated text."""

from collections import Counter
from dataclasses import dataclass

from crosstrain import Dropped, Filter, Fraction, registry


@registry.register_processor("repetition")
class RepetitionFilter(Filter):
    """Drop documents with many repeated lines, paragraphs or phrases; limits from Rae et al., 2021, table A1."""

    @dataclass
    class Options:
        """Maximum shares, from 0 to 1; 1: no limit."""

        lines: Fraction = 0.3  # share of lines that repeat an earlier line
        paragraphs: Fraction = 0.3  # share of paragraphs that repeat an earlier paragraph
        characters_in_lines: Fraction = 0.2  # share of all characters in repeated lines
        phrase_2: Fraction = 0.2  # share of all characters in the most frequent phrase of two words
        phrase_3: Fraction = 0.18  # share of all characters in the most frequent phrase of three words
        phrase_4: Fraction = 0.16  # share of all characters in the most frequent phrase of four words

    options: Options

    def text(self, text: str) -> str | Dropped:
        lines = [line for line in text.split("\n") if line.strip()]
        paragraphs = [part for part in text.split("\n\n") if part.strip()]
        repeated = sum((count - 1) * len(line) for line, count in Counter(lines).items())
        shares = {
            "lines": _repeated(lines),
            "paragraphs": _repeated(paragraphs),
            "characters_in_lines": repeated / max(len(text), 1),
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


def _most_frequent(words: list[str], length: int) -> int:
    """Count the characters in all occurrences of the most frequent phrase of `length` words; 0 if none recurs."""
    phrases = Counter(zip(*(words[k:] for k in range(length)), strict=False))
    phrase, count = max(phrases.items(), key=lambda item: item[1], default=((), 0))
    return count * (sum(map(len, phrase)) + length - 1) if count > 1 else 0
