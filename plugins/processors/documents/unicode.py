"""Repair wrongly decoded text."""

from dataclasses import dataclass
from typing import Literal

from crosstrain import Dropped, Filter, registry, require


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
