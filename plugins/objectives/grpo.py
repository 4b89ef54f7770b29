"""Policy gradients on completions that the policy samples while it trains: GRPO and its relatives."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from crosstrain import (
    IGNORE_INDEX,
    Batch,
    Component,
    Fraction,
    MicroBatch,
    NonNegativeFloat,
    Objective,
    OptionError,
    Policy,
    PositiveFloat,
    PositiveInt,
    RolloutOptions,
    Step,
    TrainingError,
    registry,
)

from .episode import Episode, Player, Reward, batch_of

_REFERENCE, _SAMPLER = "reference", "sampler"  # copies of the weights
_EPSILON = 1e-4  # added to the standard deviation of rewards
Advantage = Literal["standardized", "centered", "leave_one_out", "reward"]
Average = Literal["completions", "tokens", "sum", "budget"]
Ratio = Literal["token", "completion", "detached"]


@registry.register_objective("grpo")
class GRPO(Objective):
    """Group relative policy optimization (Shao et al., 2024, equation 3).

    In validation, each prompt gets one greedy completion, and the loss is minus the mean reward.
    """

    @dataclass(kw_only=True)
    class Options(RolloutOptions):
        """Rewards, sampling and the loss; the defaults are those of the paper, without the divergence."""

        rewards: list[Annotated[Component, "reward"]]  # an episode's reward is their weighted sum
        temperature: PositiveFloat = 1.0  # of sampling, and of the probabilities in the loss
        # standardized: (reward - mean) / (standard deviation + 1e-4) over a prompt's completions; centered: reward -
        # mean; leave_one_out: reward - mean of the others; reward: the reward itself
        advantage: Advantage = "standardized"
        # completions: mean over completions of the mean over a completion's tokens; tokens: mean over all tokens; sum:
        # mean over completions of the sum over tokens; budget: this sum divided by the limit of tokens
        average: Average = "completions"
        # token: ratio of probabilities of a token; completion: geometric mean over a completion (GSPO); detached: a
        # factor of the token's log-probability, without gradient (CISPO)
        ratio: Ratio = "token"
        clip: Fraction = 0.2  # ratios below 1 - clip get no gradient
        clip_high: NonNegativeFloat | None = None  # the same for ratios above 1 + clip_high; None: clip
        kl: NonNegativeFloat = 0.0  # weight of the divergence from the weights before training; 0: no copy is kept
        # number of consecutive optimizer steps that learn from the same completions: mu in the paper's algorithm 1,
        # num_iterations in TRL; the last of these steps is this number - 1 steps off-policy
        updates_per_rollout: PositiveInt = 1  # type: ignore[misc]
        # the sampling weights are renewed every n batches of prompts, so completions are sampled by weights that are up
        # to n - 1 batches old
        sampler_steps: PositiveInt = 1
        # upper limit of the factor that corrects for the sampler's rounding: p(learner) / p(sampler) (Yao et al., 2025)
        correction: PositiveFloat = 2.0
        skip_equal: bool = False  # leave out prompts whose completions all have the same reward (DAPO)
        skip_unfinished: bool = False  # leave out completions without an end token (DAPO)
        turns: PositiveInt = 1  # type: ignore[misc]  # maximum turns of the policy per episode; more than 1 need an environment
        environment: Annotated[Component, "environment"] | None = None  # replies to the policy's turns
        # exact: fail unless the learner's log-probabilities have the same bits as the sampler's
        parity: Literal["measured", "exact"] = "measured"

        def __post_init__(self) -> None:
            if not self.rewards:
                raise OptionError("rewards", "needs at least one reward, such as [{name: answer}]")
            if self.turns > 1 and self.environment is None:
                raise OptionError("turns", f"{self.turns} turns need an environment that replies; set environment")

    options: Options
    row_layout = "prompts"
    fields = ("answer", "sampled", "advantages", "old", "reference", "reward", "counts", "measured")

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        # A list, because a reward may be named twice, with different options.
        self.rewards: list[tuple[str, Reward]] = [
            (reward.name, registry.get("reward", reward.name)(reward.options)) for reward in options.rewards
        ]
        self.names = ("reward", "length", "finished", *(f"reward/{name}" for name, _ in self.rewards))  # logged means
        world = options.environment
        environment = None if world is None else registry.get("environment", world.name)(world.options)
        self.player = Player(options.max_new_tokens, options.turns, environment)
        stale = options.sampler_steps * options.updates_per_rollout > 1  # some steps are off-policy
        self.keeps: Sequence[str] = (_REFERENCE,) * (options.kl > 0) + (_SAMPLER,) * stale
        if options.temperature != 1:
            self.token_losses = self._tempered

    @property
    def unit(self) -> str:  # type: ignore[override]
        return "sampled tokens" if self.options.average == "tokens" and self.model.training else "completions"

    # ---- sampling

    def begin_step(self, step: Step, policy: Policy) -> Step:
        training, options = self.model.training, self.options
        # number of updates since the sampler was renewed
        behind = step.numbers[0] // len(step.numbers) % options.sampler_steps * options.updates_per_rollout + step.use
        if training and _SAMPLER in self.keeps:
            self.record("off_policy_steps", torch.tensor([float(behind)]))
            if not behind:
                policy.keep(_SAMPLER)
        by_sampler = training and behind > 0 and "old" not in step[0].data
        with policy.kept(_SAMPLER) if by_sampler else nullcontext():
            for micro in step:
                if "sampled" not in micro.data:  # the first step with these samples, or the first one after a restart
                    micro.data = self._sampled(micro, policy)
                if by_sampler:
                    micro.data["old"] = policy.log_probabilities(micro.data)
        if training and options.kl and "reference" not in step[0].data:
            with policy.kept(_REFERENCE):
                for micro in step:
                    micro.data["reference"] = policy.log_probabilities(micro.data)
        for name, values in zip(self.names, torch.cat([micro.data["measured"] for micro in step]).T, strict=True):
            self.record(name, values)
        return step

    def _sampled(self, micro: MicroBatch, policy: Policy) -> Batch:
        """Return the micro batch with a row for each completion."""
        options, training = self.options, self.model.training
        n, temperature = (options.completions, options.temperature) if training else (1, 0.0)
        episodes = self.player.play(micro, policy, n, temperature)
        measured = self._measured(episodes)
        rewards = measured[:, 0].contiguous().view(-1, n)  # a column with strides is summed in a different order
        batch = batch_of(episodes, self.model.max_length)
        counts = torch.ones(len(episodes))
        if training and options.skip_equal:
            counts = (rewards.amax(1) > rewards.amin(1)).float().repeat_interleave(n)
        if training and options.skip_unfinished:
            counts *= torch.tensor([float(episode.ended) for episode in episodes])
        batch |= {"reward": rewards.flatten(), "counts": counts, "measured": measured}
        batch["advantages"] = advantages(rewards, options.advantage).flatten()
        if training and options.parity == "exact":
            difference = (policy.log_probabilities(batch) - batch["sampled"]).abs().max()
            if difference != 0:
                raise TrainingError(
                    f"run.objective.parity: the learner's log-probabilities differ from the sampler's by up to "
                    f"{difference:.1e}; use parity: measured"
                )
        return batch

    def _measured(self, episodes: list[Episode]) -> Tensor:
        """Return what `names` lists of the episodes [episodes, names]; the first is the weighted sum of the rewards."""
        parts = [torch.tensor(reward.of_all(episodes)) for _, reward in self.rewards]
        total = sum(
            (reward.options.weight * part for (_, reward), part in zip(self.rewards, parts, strict=True)),
            torch.zeros(len(episodes)),
        )
        of_episodes = torch.tensor([[float(episode.length), float(episode.ended)] for episode in episodes])
        return torch.stack([total, *of_episodes.T, *parts], 1)

    # ---- the loss

    def units(self, batch: Batch) -> int:
        if "labels" not in batch or not self.model.training:
            return len(batch["input_ids"])
        if self.options.average == "tokens":
            return int(((batch["labels"] != IGNORE_INDEX) & (batch["counts"] > 0)[:, None]).sum())
        return int(batch["counts"].sum())

    def loss(self, losses: Tensor, batch: Batch) -> Tensor:
        if not self.model.training:
            return -batch["reward"].sum()
        options, now = self.options, -losses
        targets = batch["labels"] != IGNORE_INDEX
        lengths = targets.sum(1, keepdim=True).clamp(min=1)
        old = batch.get("old", now.detach())
        gain = self._gain(now, old, targets, lengths, batch["advantages"][:, None])
        difference = torch.where(targets, old - batch["sampled"], 0.0)
        gain = gain * difference.exp().clamp(max=options.correction)
        self.record("parity", difference.abs(), targets.float())
        self.record("parity_largest", difference.abs().amax()[None])
        if options.kl:
            behind = torch.where(targets, batch["reference"] - now, 0.0)
            divergence = behind.exp() - behind - 1  # Schulman's estimator, which is never negative
            gain = gain - options.kl * divergence
            self.record("kl", divergence.detach(), targets.float())
        weight = batch["counts"][:, None].expand(targets.shape)
        if options.average == "completions":
            weight = weight / lengths
        elif options.average == "budget":
            weight = weight / (options.max_new_tokens * options.turns)
        return -torch.where(targets, gain * weight, 0.0).sum()

    def _gain(self, now: Tensor, old: Tensor, targets: Tensor, lengths: Tensor, advantage: Tensor) -> Tensor:
        """Return what each token adds to the objective [rows, length], from its log-probabilities `now` and `old`."""
        options = self.options
        logarithm = torch.where(targets, now - old, 0.0)
        if options.ratio == "completion":
            logarithm = (logarithm.sum(1, keepdim=True) / lengths).expand(targets.shape)
        ratio, high = logarithm.exp(), options.clip if options.clip_high is None else options.clip_high
        clipped = ratio.clamp(1 - options.clip, 1 + high)
        self.record("clipped", (ratio != clipped).float(), targets.float())
        if options.ratio == "detached":
            return ratio.detach().clamp(max=1 + high) * advantage * now
        return torch.minimum(ratio * advantage, clipped * advantage)

    def _tempered(self, logits: Tensor, place: slice, batch: Batch) -> Tensor:
        """Token losses at the temperature of sampling; see `Objective.token_losses`."""
        labels = batch["labels"].to(logits.device).flatten()[place, None]
        scaled = (logits / self.options.temperature).log_softmax(-1)
        return -scaled.gather(1, labels.masked_fill(labels == IGNORE_INDEX, 0))[:, 0]


def advantages(rewards: Tensor, kind: Advantage) -> Tensor:
    """Return the advantages of completions from their rewards; both are [prompts, completions]."""
    n = rewards.shape[1]
    if kind == "reward" or n == 1:
        return rewards
    centered = rewards - rewards.mean(1, keepdim=True)
    if kind == "leave_one_out":
        return centered * n / (n - 1)
    return centered if kind == "centered" else centered / (rewards.std(1, keepdim=True) + _EPSILON)
