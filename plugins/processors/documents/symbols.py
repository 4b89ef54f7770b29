"""Drop documents of symbols rather than words."""

from dataclasses import dataclass

from crosstrain import Dropped, Filter, Fraction, NonNegativeFloat, registry

_BULLETS = ("-", "*", "•", "‣", "●")
_ELLIPSES = ("...", "…")


@registry.register_processor("symbols")
class SymbolsFilter(Filter):
    """Drop documents with too many signs and too few words, by the shares of Rae et al. 2021, appendix A1.1."""

    @dataclass
    class Options:
        """Limits, as shares from 0 to 1."""

        hashes: NonNegativeFloat = 0.1  # at most so many # per word
        ellipses: NonNegativeFloat = 0.1  # at most so many ... per word
        words: Fraction = 0.8  # at least this share of the words has a letter
        bullets: Fraction = 0.9  # at most this share of the lines begins with a bullet
        cut_lines: Fraction = 0.3  # at most this share of the lines ends with an ellipsis

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
        for name, share in shares.items():
            if share > getattr(limits, name):
                return Dropped(f"{name} {share:.2f}")
        return text
