"""Drop documents that are too short or too long."""

from dataclasses import dataclass

from crosstrain import Dropped, NonNegativeInt, OptionError, registry

from ...commands.prepare.filter import TokenLimits


@registry.register_processor("document_length")
class DocumentLengthFilter(TokenLimits):
    """Keep documents of at least 128 tokens; other limits can be set."""

    @dataclass
    class Options:
        """Limits, included in what is kept."""

        min_tokens: NonNegativeInt = 128  # without the end-of-text token
        max_tokens: NonNegativeInt | None = None  # without the end-of-text token
        min_characters: NonNegativeInt = 0  # of the text
        max_characters: NonNegativeInt | None = None  # of the text

        def __post_init__(self) -> None:
            for unit in ("tokens", "characters"):
                least, most = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
                if most is not None and most < least:
                    raise OptionError(f"max_{unit}", f"{most} is below min_{unit}, {least}")

    def __init__(self, options: Options) -> None:
        super().__init__(options, options.min_tokens, options.max_tokens)

    def text(self, text: str) -> str | Dropped:
        least, most = self.options.min_characters, self.options.max_characters
        if len(text) < least or (most is not None and len(text) > most):
            return Dropped(f"{len(text)} characters")
        return text
