"""GRPO (Shao et al., 2024) on arithmetic that a program checks: completions are drawn while training, by the policy.

Prompts are `a+b=`, one token a digit or sign. A completion is right if it is the sum's last digit, then the end token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crosstrain import (
    IGNORE_INDEX,
    Batch,
    Dataset,
    Fraction,
    MicroBatch,
    NonNegativeFloat,
    Objective,
    Policy,
    PositiveFloat,
    PositiveInt,
    Sample,
    Split,
    Step,
    registry,
)

PLUS, EQUALS, END, VOCABULARY = 10, 11, 12, 13  # tokens; 0 to 9 are digits


@registry.register_dataset("digit_sums")
class Arithmetic(Dataset):
    """Sums of two digits below a limit, as prompts with their answers."""

    @dataclass
    class Options:
        digits: PositiveInt = 10  # both summands are below this number
        size: PositiveInt = 100  # samples of an epoch

    vocab_size = VOCABULARY
    sequence_length = 4
    row_layout = "prompts"

    def __init__(self, options: Any, split: Split) -> None:
        super().__init__(options, split)
        self.digest = f"{options.digits}"

    def __len__(self) -> int:
        return self.options.size

    def get(self, index: int, rng: np.random.Generator) -> Sample:
        a, b = rng.integers(0, self.options.digits, 2)
        return {"input_ids": np.array([a, PLUS, b, EQUALS]), "answer": np.array((a + b) % 10)}


@registry.register_objective("short_grpo")
class GRPO(Objective):
    """Clipped policy gradient with advantages relative to a prompt's own completions, and a divergence from the start.

    The loss is a mean over the completions' tokens, all of a step alike.
    """

    @dataclass
    class Options:
        """The paper's defaults, but for shorter and fewer completions."""

        completions: PositiveInt = 8  # of each prompt
        max_new_tokens: PositiveInt = 3
        temperature: PositiveFloat = 1.0
        clip: Fraction = 0.2
        kl: NonNegativeFloat = 0.04  # weight of the divergence from the weights before training

    options: Options
    row_layout = "prompts"
    unit = "sampled tokens"
    fields = ("advantages", "old", "reference", "answer")
    keeps = ("reference",)

    def begin_step(self, step: Step, policy: Policy) -> Step:
        for micro in step:
            micro.data = self.sampled(micro, policy)
        return step

    def sampled(self, micro: MicroBatch, policy: Policy) -> Batch:
        """The micro batch with a row for each completion, its advantage, and log-probabilities before the update."""
        options, prompts = self.options, micro.data["input_ids"]
        keys = [(number, i) for number in micro.numbers for i in range(options.completions)]
        prompts = prompts.repeat_interleave(options.completions, 0)
        samples = [{"input_ids": prompt.numpy()} for prompt in prompts]
        found = policy.generate(samples, keys, options.max_new_tokens, options.temperature, (END,))
        completions = [completion.tokens for completion in found]
        answers = micro.data["answer"].repeat_interleave(options.completions)
        rewards = torch.tensor([self.reward(c, int(a)) for c, a in zip(completions, answers, strict=True)])
        self.record("reward", rewards)
        batch = rows(prompts, completions, options.max_new_tokens)
        batch["advantages"] = advantages(rewards.view(-1, options.completions)).flatten()
        batch["old"] = policy.log_probabilities(batch)
        with policy.kept("reference"):
            batch["reference"] = policy.log_probabilities(batch)
        return batch

    def reward(self, completion: list[int], answer: int) -> float:
        """1 for the right digit and the end; a tenth for any single digit and the end, which a new model finds."""
        if completion == [answer, END]:
            return 1.0
        return 0.1 if len(completion) == 2 and completion[0] < PLUS and completion[1] == END else 0.0

    def units(self, batch: Batch) -> int:
        return int((batch["labels"] != IGNORE_INDEX).sum()) if "labels" in batch else len(batch["input_ids"])

    def loss(self, losses: Tensor, batch: Batch) -> Tensor:
        now, advantage = -losses, batch["advantages"][:, None]
        ratio = (now - batch["old"]).exp()
        clipped = ratio.clamp(1 - self.options.clip, 1 + self.options.clip)
        behind = batch["reference"] - now
        divergence = behind.exp() - behind - 1  # Schulman's estimator, which is never negative
        gain = torch.minimum(ratio * advantage, clipped * advantage) - self.options.kl * divergence
        targets = batch["labels"] != IGNORE_INDEX
        self.record("kl", divergence.detach(), targets.float())
        return -torch.where(targets, gain, 0.0).sum()


def advantages(rewards: Tensor) -> Tensor:
    """Rewards [prompts, completions], centred and scaled within each prompt."""
    deviation = rewards.std(1, keepdim=True, unbiased=False)
    return (rewards - rewards.mean(1, keepdim=True)) / (deviation + 1e-4)


def rows(prompts: Tensor, completions: list[list[int]], longest: int) -> Batch:
    """Prompts [rows, p] with their completions as inputs and labels [rows, p + longest - 1]; only completions count."""
    tails = torch.full((len(prompts), longest), IGNORE_INDEX)
    for tail, completion in zip(tails, completions, strict=True):
        tail[: len(completion)] = torch.tensor(completion)
    whole = torch.cat([prompts, tails.masked_fill(tails == IGNORE_INDEX, END)], 1)
    ignored = torch.full((len(prompts), prompts.shape[1] - 1), IGNORE_INDEX)
    return {"input_ids": whole[:, :-1], "labels": torch.cat([ignored, tails], 1)}
