"""Filters of documents: language, length, repetition, symbols and wrongly decoded characters."""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

from annotated_types import MinLen

from crosstrain import (
    Dropped,
    Filter,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    OptionError,
    PositiveInt,
    Text,
    registry,
    require,
)

_BULLETS = ("-", "*", "•", "‣", "●")
_ELLIPSES = ("...", "…")


@registry.register_processor("language")
class LanguageFilter(Filter):
    """Keep documents in the given languages, identified by py3langid and its bundled model."""

    @dataclass
    class Options:
        """Languages to keep."""

        keep: Annotated[list[Text], MinLen(1)]  # ISO 639-1 codes of the languages to keep, such as en
        probability: Fraction = 0.5  # minimum probability of the language
        characters: PositiveInt = 4000  # number of characters to classify, from the middle of the document

    options: Options

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.identifier = _identifier()
        known = sorted(map(str, self.identifier.labels))
        if unknown := [code for code in options.keep if code not in known]:
            raise OptionError("keep", f"unknown language {unknown[0]!r}; known: {', '.join(known)}")

    def text(self, text: str) -> str | Dropped:
        start = max(0, (len(text) - self.options.characters) // 2)
        language, probability = self.identifier.classify(text[start : start + self.options.characters])
        if language in self.options.keep and probability >= self.options.probability:
            return text
        return Dropped(f"{language} ({probability:.2f})")


@cache
def _identifier() -> Any:
    langid = require("py3langid.langid", "the filter language")
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


@registry.register_processor("document_length")
class DocumentLengthFilter(Filter):
    """Keep only documents within limits on tokens and characters; by default, at least 128 tokens."""

    @dataclass
    class Options:
        """Inclusive limits."""

        min_tokens: NonNegativeInt = 128  # minimum number of tokens, excluding the end-of-text token
        # maximum number of tokens, excluding the end-of-text token; None: no limit
        max_tokens: NonNegativeInt | None = None
        min_characters: NonNegativeInt = 0  # minimum number of characters
        max_characters: NonNegativeInt | None = None  # maximum number of characters; None: no limit

        def __post_init__(self) -> None:
            for unit in ("tokens", "characters"):
                least, most = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
                if most is not None and most < least:
                    raise OptionError(f"max_{unit}", f"{most} is below min_{unit}={least}")

    options: Options

    def text(self, text: str) -> str | Dropped:
        return self._outside(len(text), "characters") or text

    def tokens(self, count: int) -> Dropped | None:
        return self._outside(count, "tokens")

    def _outside(self, count: int, unit: str) -> Dropped | None:
        """Return `Dropped` if a count is outside the limits of its unit, else None."""
        least, most = getattr(self.options, f"min_{unit}"), getattr(self.options, f"max_{unit}")
        return None if least <= count and (most is None or count <= most) else Dropped(f"{count} {unit}")


@registry.register_processor("repetition")
class RepetitionFilter(Filter):
    """Drop documents with many repeated lines, paragraphs or phrases; limits from Rae et al., 2021, table A1."""

    @dataclass
    class Options:
        """Maximum shares, from 0 to 1; 1: no limit."""

        lines: Fraction = 0.3  # maximum share of lines that repeat an earlier line
        paragraphs: Fraction = 0.3  # maximum share of paragraphs that repeat an earlier paragraph
        characters_in_lines: Fraction = 0.2  # maximum share of characters in repeated lines
        phrase_2: Fraction = 0.2  # maximum share of characters in the most frequent phrase of two words
        phrase_3: Fraction = 0.18  # maximum share of characters in the most frequent phrase of three words
        phrase_4: Fraction = 0.16  # maximum share of characters in the most frequent phrase of four words

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
        shares |= {f"phrase_{n}": min(1.0, _most_frequent(words, n) / max(len(text), 1)) for n in (2, 3, 4)}
        return _too_large(shares, self.options) or text


def _repeated(parts: list[str]) -> float:
    return 1 - len(set(parts)) / len(parts) if parts else 0.0


def _most_frequent(words: list[str], length: int) -> int:
    """Count the characters in all occurrences of the most frequent phrase of `length` words; 0 if no phrase recurs."""
    phrases = Counter(zip(*(words[k:] for k in range(length)), strict=False))
    phrase, count = max(phrases.items(), key=lambda item: item[1], default=((), 0))
    return count * (sum(map(len, phrase)) + length - 1) if count > 1 else 0


@registry.register_processor("symbols")
class SymbolsFilter(Filter):
    """Drop documents with too many symbols or too few words; limits from Rae et al., 2021, appendix A1.1."""

    @dataclass
    class Options:
        """Limits, as shares or counts per word."""

        hashes: NonNegativeFloat = 0.1  # maximum number of # characters per word
        ellipses: NonNegativeFloat = 0.1  # maximum number of ellipses per word
        words: Fraction = 0.8  # minimum share of words with a letter
        bullets: Fraction = 0.9  # maximum share of lines that begin with a bullet
        cut_lines: Fraction = 0.3  # maximum share of lines that end with an ellipsis

    options: Options

    def text(self, text: str) -> str | Dropped:
        words = text.split()
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        count, rows, limits = max(len(words), 1), max(len(lines), 1), self.options
        lettered = sum(any(map(str.isalpha, word)) for word in words) / count
        if lettered < limits.words:
            return Dropped(f"words {lettered:.2f}")
        shares = {
            "hashes": text.count("#") / count,
            "ellipses": sum(map(text.count, _ELLIPSES)) / count,
            "bullets": sum(line.startswith(_BULLETS) for line in lines) / rows,
            "cut_lines": sum(line.endswith(_ELLIPSES) for line in lines) / rows,
        }
        return _too_large(shares, limits) or text


def _too_large(shares: dict[str, float], limits: Any) -> Dropped | None:
    """Return `Dropped` if a share is above the limit of the same name, else None."""
    name = next((name for name, share in shares.items() if share > getattr(limits, name)), None)
    return None if name is None else Dropped(f"{name} {shares[name]:.2f}")


@registry.register_processor("unicode")
class UnicodeFilter(Filter):
    """Repair wrongly decoded characters, HTML entities, ligatures and control characters, with ftfy."""

    @dataclass
    class Options:
        """Additional changes."""

        normalization: Literal["NFC", "NFKC", "none"] = "NFC"  # Unicode normalization form; none: no normalization
        straight_quotes: bool = False  # replace curly quotation marks with straight ones

    options: Options

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.ftfy = require("ftfy", "the filter unicode")
        form = None if options.normalization == "none" else options.normalization
        self.config = self.ftfy.TextFixerConfig(
            normalization=form, uncurl_quotes=options.straight_quotes, explain=False
        )

    def text(self, text: str) -> str | Dropped:
        return self.ftfy.fix_text(text, self.config)
