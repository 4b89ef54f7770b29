"""Drop documents that are too short or too long."""

from dataclasses import dataclass

from crosstrain import Dropped, Filter, NonNegativeInt, OptionError, registry


@registry.register_processor("document_length")
class DocumentLengthFilter(Filter):
    """Keep documents within limits on tokens and characters; by default at least 128 tokens."""

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
                    raise OptionError(f"max_{unit}", f"{most} is below min_{unit}, {least}")

    options: Options

    def text(self, text: str) -> str | Dropped:
        least, most = self.options.min_characters, self.options.max_characters
        return text if _within(len(text), least, most) else Dropped(f"{len(text)} characters")

    def tokens(self, count: int) -> Dropped | None:
        least, most = self.options.min_tokens, self.options.max_tokens
        return None if _within(count, least, most) else Dropped(f"{count} tokens")


def _within(count: int, least: int, most: int | None) -> bool:
    return least <= count and (most is None or count <= most)
