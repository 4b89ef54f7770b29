"""Preference objectives: DPO, ORPO and KTO."""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor
from torch.nn.functional import logsigmoid

from crosstrain import IGNORE_INDEX, Batch, Objective, PositiveFloat, log_probabilities, registry

_REWARDS = ("chosen", "rejected", "margins", "accuracies")


class OfPairs(Objective):
    """Base class of objectives on pairs of rows.

    Rows 2 i are chosen answers, and rows 2 i + 1 are rejected answers, unless a subclass defines a different layout.
    """

    fields = ("preferred", "reference")
    row_layout = unit = "pairs"

    def units(self, batch: Batch) -> int:
        return len(batch["labels"]) // 2

    def record_rewards(self, chosen: Tensor, rejected: Tensor) -> None:
        margins = chosen - rejected
        for name, values in zip(_REWARDS, (chosen, rejected, margins, (margins > 0).float()), strict=True):
            self.record(f"rewards/{name}", values)


@registry.register_objective("dpo")
class DPO(OfPairs):
    """Direct preference optimization (Rafailov et al., 2023, equation 7); the initial model is the reference."""

    @dataclass
    class Options:
        """Options with the defaults of the authors' code."""

        beta: PositiveFloat = 0.1  # strength of the penalty for deviating from the reference model
        # assumed share of pairs in the wrong order (Mitchell, 2023)
        label_smoothing: Annotated[float, Interval(ge=0, lt=0.5)] = 0.0

    options: Options
    needs_reference = "rows"

    def loss(self, losses: Tensor, batch: Batch) -> Tensor:
        rewards = self.options.beta * (log_probabilities(losses) - batch["reference"])
        chosen, rejected = rewards[0::2], rewards[1::2]
        self.record_rewards(chosen, rejected)
        wrong, logits = self.options.label_smoothing, chosen - rejected
        return -((1 - wrong) * logsigmoid(logits) + wrong * logsigmoid(-logits)).sum()


@registry.register_objective("orpo")
class ORPO(OfPairs):
    """Odds ratio preference optimization (Hong et al., 2024, equations 6 and 7); needs no reference model.

    The likelihood of a sequence is the geometric mean of its token probabilities. The cross-entropy of a pair is the
    mean over the tokens of the chosen answer.
    """

    @dataclass
    class Options:
        """Options with the default of the paper."""

        beta: PositiveFloat = 0.1  # weight of the odds ratio loss, lambda in the paper

    options: Options

    def loss(self, losses: Tensor, batch: Batch) -> Tensor:
        means = log_probabilities(losses) / (batch["labels"] != IGNORE_INDEX).sum(1).clamp(min=1)
        odds = means - torch.log(-torch.expm1(means.clamp(max=-1e-7)))  # log(p / (1 - p))
        chosen, rejected = odds[0::2], odds[1::2]
        self.record_rewards(self.options.beta * means[0::2], self.options.beta * means[1::2])
        return -(means[0::2] + self.options.beta * logsigmoid(chosen - rejected)).sum()


@registry.register_objective("kto")
class KTO(OfPairs):
    """Kahneman-Tversky optimization (Ethayarajh et al., 2024, equation 8), on answers labelled good or bad.

    Rows 2 i are the labelled answers. Rows 2 i + 1 combine the same prompts with answers to different prompts. As in
    the paper, the mean log-ratio of rows 2 i + 1 estimates the divergence from the reference model, once per micro
    batch and without a gradient.
    """

    @dataclass
    class Options:
        """Options with the defaults of the paper."""

        beta: PositiveFloat = 0.1  # strength of the penalty for deviating from the reference model
        desirable_weight: PositiveFloat = 1.0  # loss weight of good answers
        undesirable_weight: PositiveFloat = 1.0  # loss weight of bad answers

    options: Options
    row_layout, unit = "single answers", "answers"
    needs_reference = "rows"

    def loss(self, losses: Tensor, batch: Batch) -> Tensor:
        options = self.options
        ratios = log_probabilities(losses) - batch["reference"]
        ours, others = ratios[0::2], ratios[1::2].detach()
        divergence = others.mean().clamp(min=0)
        good = batch["preferred"][0::2] > 0
        sign = torch.where(good, 1.0, -1.0)
        weight = torch.where(good, options.desirable_weight, options.undesirable_weight)
        self.record("rewards/desirable", options.beta * ours, good.float())
        self.record("rewards/undesirable", options.beta * ours, 1 - good.float())
        self.record("kl", divergence[None])
        return (weight * (1 - torch.sigmoid(sign * options.beta * (ours - divergence)))).sum()
