"""Drop documents that are too short or too long."""

from dataclasses import dataclass

from crosstrain import Dropped, NonNegativeInt, OptionError, registry

from ...commands.prepare.filter import TokenLimits


@registry.register_processor("document_length")
class DocumentLengthFilter(TokenLimits):
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

    def __init__(self, options: Options) -> None:
        super().__init__(options, options.min_tokens, options.max_tokens)

    def text(self, text: str) -> str | Dropped:
        least, most = self.options.min_characters, self.options.max_characters
        if len(text) < least or (most is not None and len(text) > most):
            return Dropped(f"{len(text)} characters")
        return text
