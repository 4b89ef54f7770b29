"""Reward models: a language model learns to score answers, and its scores are rewards of policy gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from crosstrain import IGNORE_INDEX, Batch, Episode, NonNegativeInt, Reward, RewardOptions, Text, log, registry

from .distill import Hidden, load_frozen
from .episode import batch_of
from .preference import OfPairs

_ROWS = 16  # episodes that are scored at once


@registry.register_objective("reward_model")
class RewardModel(OfPairs):
    """Bradley-Terry loss of a pair's scores (Ouyang et al., 2022, equation 1).

    The score of an answer is one logit at its last token before the end token, so a reward model is a language model
    like any other, as in Nemotron's (Wang et al., 2024).
    """

    @dataclass
    class Options:
        """The logit that is the score."""

        token: NonNegativeInt = 0  # ID whose logit is the score

    options: Options
    fields = ("preferred",)

    def token_losses(self, logits: Tensor, place: slice, batch: Batch) -> Tensor:  # type: ignore[override]
        return logits[:, self.options.token]

    def loss(self, losses: Tensor, batch: Batch) -> Tensor:
        scores = losses.gather(1, last_targets(batch["labels"]))[:, 0]
        chosen, rejected = scores[0::2], scores[1::2]
        self.record_rewards(chosen, rejected)
        return -logsigmoid(chosen - rejected).sum()


def last_targets(labels: Tensor) -> Tensor:
    """Return the place [rows, 1] of the last target of each row of labels [rows, length]."""
    places = torch.arange(labels.shape[1], device=labels.device)
    return torch.where(labels != IGNORE_INDEX, places, 0).amax(1, keepdim=True)


@registry.register_reward("reward_model")
class RewardModelReward(Reward):
    """The score of a model that was trained with the objective `reward_model`; every rank holds all of it."""

    @dataclass(kw_only=True)
    class Options(RewardOptions):
        """The model and its score."""

        model: Text  # Hugging Face name, folder or run, with the policy's tokenizer
        token: NonNegativeInt = 0  # ID whose logit is the score
        weights: Literal["fp32", "bf16", "fp16"] = "fp32"  # dtype of the model

    options: Options

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.head = Hidden()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = load_frozen(options.model, options.weights, device)
        log.info("reward model: %s", options.model)

    def __call__(self, episode: Episode) -> float:
        return self.of_all([episode])[0]

    @torch.no_grad()
    def of_all(self, episodes: Sequence[Episode]) -> list[float]:
        scores = []
        for start in range(0, len(episodes), _ROWS):
            batch = batch_of(episodes[start : start + _ROWS], self.model.max_length)
            hidden = self.head.hidden(self.model, {key: batch[key] for key in ("input_ids", "labels")})
            last = last_targets(batch["labels"])[:, 0].to(hidden.device)
            scores += self.head.of(hidden[torch.arange(len(hidden)), last])[:, self.options.token].tolist()
        return scores
