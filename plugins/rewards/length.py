"""A reward that becomes negative for long completions."""

from dataclasses import dataclass

from crosstrain import Episode, OptionError, PositiveInt, Reward, RewardOptions, registry


@registry.register_reward("overlong")
class OverlongReward(Reward):
    """0 up to `longest` - `margin` sampled tokens, then falling linearly to -1 (Yu et al., 2025, equation 13)."""

    @dataclass(kw_only=True)
    class Options(RewardOptions):
        """Lengths in tokens."""

        longest: PositiveInt  # from here, the reward is -1
        margin: PositiveInt  # tokens over which the reward falls

        def __post_init__(self) -> None:
            if self.margin > self.longest:
                raise OptionError("margin", f"{self.margin} must not be above longest, {self.longest}")

    options: Options

    def __call__(self, episode: Episode) -> float:
        over = episode.length - (self.options.longest - self.options.margin)
        return -min(max(over / self.options.margin, 0.0), 1.0)
