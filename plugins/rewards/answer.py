"""Rewards for the answer that a completion gives."""

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from crosstrain import Episode, OptionError, Reward, RewardOptions, Text, registry

_NUMBER = r"-?\d[\d,]*(?:\.\d+)?"


@dataclass
class PatternOptions(RewardOptions):
    """The pattern of an answer."""

    # regular expression of an answer, with at most one group, which then is the answer; default: a number
    pattern: Text = _NUMBER

    def __post_init__(self) -> None:
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise OptionError("pattern", f"{self.pattern!r} is not a regular expression ({error})") from None
        if groups > 1:
            raise OptionError(
                "pattern", f"{self.pattern!r} has {groups} groups; use at most one, and (?:...) for the others"
            )


@registry.register_reward("answer")
class AnswerReward(Reward):
    """1 if the last match of a pattern in the text is that of the reference answer, else 0.

    Numbers are compared by value, so 1,000.0 equals 1000; other texts are compared without surrounding white space.
    """

    Options = PatternOptions
    options: PatternOptions

    def __call__(self, episode: Episode) -> float:
        given, reference = (self._found(text) for text in (episode.text, episode.answer))
        return float(reference is not None and given == reference)

    def _found(self, text: str) -> Decimal | str | None:
        found = re.findall(self.options.pattern, text)
        if not found:
            return None
        try:
            return Decimal(found[-1].replace(",", "").strip())
        except InvalidOperation:
            return str(found[-1]).strip()


@registry.register_reward("matches")
class MatchesReward(Reward):
    """1 if the whole text matches a pattern, else 0."""

    @dataclass
    class Options(PatternOptions):
        """The pattern; a dot also matches line breaks."""

        pattern: Text = r"<think>.+</think>.*\S.*"  # regular expression of the whole text

    options: Options

    def __call__(self, episode: Episode) -> float:
        return float(re.fullmatch(self.options.pattern, episode.text, re.DOTALL) is not None)
