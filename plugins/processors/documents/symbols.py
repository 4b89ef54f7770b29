"""Drop documents with too many symbols."""

from dataclasses import dataclass

from crosstrain import Dropped, Filter, Fraction, NonNegativeFloat, registry

_BULLETS = ("-", "*", "•", "‣", "●")
_ELLIPSES = ("...", "…")


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
        for name, share in shares.items():
            if share > getattr(limits, name):
                return Dropped(f"{name} {share:.2f}")
        return text
