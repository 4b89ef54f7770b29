"""Keep documents in given languages."""

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from annotated_types import MinLen

from crosstrain import Dropped, Filter, Fraction, OptionError, PositiveInt, Text, registry, require


@registry.register_processor("language")
class LanguageFilter(Filter):
    """Keep documents in the given languages, identified by py3langid and its bundled model."""

    @dataclass
    class Options:
        """Languages to keep."""

        keep: Annotated[list[Text], MinLen(1)]  # ISO 639-1 codes, such as en
        probability: Fraction = 0.5  # minimum probability of the language
        characters: PositiveInt = 4000  # number of characters to classify, from the middle of the document

    options: Options

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.identifier = _identifier()
        known = sorted(map(str, self.identifier.labels))
        if unknown := [code for code in options.keep if code not in known]:
            raise OptionError("keep", f"there is no language {unknown[0]!r}; known: {', '.join(known)}")

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
