"""Episodes: what a policy sampled for a prompt, with the replies of an environment, and the rewards for it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from crosstrain import IGNORE_INDEX, Batch, MicroBatch, Policy, PositiveInt, SampleError


@dataclass
class Episode:
    """A prompt, the policy's turns, and the replies of an environment between them."""

    key: tuple[int, int]  # sample number, index of the completion
    prompt: list[int]  # tokens
    answer: str  # reference answer
    tokens: list[int] = field(default_factory=list)  # after the prompt
    chances: list[float | None] = field(default_factory=list)  # log-probabilities of sampled tokens; None: a reply's
    turns: list[str] = field(default_factory=list)  # texts of the policy's turns
    ended: bool = False  # the last turn ends with an end token

    @property
    def text(self) -> str:
        """The policy's last turn."""
        return self.turns[-1]

    @property
    def length(self) -> int:
        """Number of sampled tokens."""
        return sum(chance is not None for chance in self.chances)


@dataclass
class RewardOptions:
    """Options of every reward."""

    weight: float = 1.0  # factor of this reward in the sum of all rewards


class Reward(ABC):
    """A reward of an episode, configured in `run.objective.rewards`."""

    Options: ClassVar[type] = RewardOptions

    def __init__(self, options: Any) -> None:
        self.options = options

    @abstractmethod
    def __call__(self, episode: Episode) -> float:
        """Return the reward, before it is multiplied by `weight`."""

    def of_all(self, episodes: Sequence[Episode]) -> list[float]:
        """Return the rewards of episodes; a reward that is faster on batches overrides this."""
        return [float(self(episode)) for episode in episodes]


class Environment(ABC):
    """Replies to the policy's turns, configured in `run.objective.environment`."""

    role: ClassVar[str] = "user"  # role of a reply in the chat template

    def __init__(self, options: Any) -> None:
        self.options = options

    @abstractmethod
    def reply(self, episode: Episode) -> str | None:
        """Return the text after the policy's last turn, `episode.text`; None: the episode ends."""


@dataclass
class Player:
    """Plays episodes with a policy."""

    max_new_tokens: int  # per turn
    turns: PositiveInt = 1  # maximum number of the policy's turns
    environment: Environment | None = None

    def play(self, micro: MicroBatch, policy: Policy, completions: int, temperature: float) -> list[Episode]:
        """Play `completions` episodes per prompt of a micro batch; those of a prompt are adjacent. Collective."""
        dataset: Any = policy.dataset
        answers = dataset.texts(_unpadded(micro.data["answer"]))
        rows = zip(micro.numbers, _unpadded(micro.data["input_ids"]), answers, strict=True)
        episodes = [Episode((number, i), prompt, answer) for number, prompt, answer in rows for i in range(completions)]
        going = episodes
        for turn in range(self.turns):
            if turn and not any(policy.all_gather(bool(going))):
                break
            sampled = policy.generate(
                [{"input_ids": np.array(episode.prompt + episode.tokens)} for episode in going],
                [(*episode.key, turn) for episode in going],
                self.max_new_tokens,
                temperature,
                dataset.end_tokens,
            )
            texts = dataset.texts([completion.tokens for completion in sampled])
            for episode, completion, text in zip(going, sampled, texts, strict=True):
                episode.tokens += completion.tokens
                episode.chances += completion.log_probabilities
                episode.turns.append(text)
                episode.ended = completion.tokens[-1] in dataset.end_tokens
            going = [] if turn + 1 == self.turns else [e for e in going if e.ended and self._continues(e, dataset)]
        return episodes

    def _continues(self, episode: Episode, dataset: Any) -> bool:
        """Append the environment's reply; return False if the episode is over."""
        if self.environment is None or (reply := self.environment.reply(episode)) is None:
            return False
        try:
            tokens = dataset.reply(self.environment.role, reply)
        except SampleError:  # the reply contains a special token
            return False
        episode.tokens += tokens
        episode.chances += [None] * len(tokens)
        return True


def batch_of(episodes: Sequence[Episode], limit: int | None) -> Batch:
    """Return episodes as rows [episodes, length], padded on the right.

    labels: the sampled tokens, IGNORE_INDEX elsewhere. sampled: their log-probabilities, 0 elsewhere. The length is
    rounded up to a multiple of 8 for tensor cores, but not above `limit`.
    """
    longest = max(len(episode.prompt) + len(episode.tokens) for episode in episodes) - 1
    rounded = -(-longest // 8) * 8
    length = rounded if limit is None else max(longest, min(rounded, limit))
    ids = np.zeros((len(episodes), length + 1), np.int64)
    labels, sampled = np.full_like(ids, IGNORE_INDEX), np.zeros(ids.shape, np.float32)
    for number, episode in enumerate(episodes):
        start, stop = len(episode.prompt), len(episode.prompt) + len(episode.tokens)
        ids[number, :stop] = episode.prompt + episode.tokens
        learned = np.array([chance is not None for chance in episode.chances])
        labels[number, start:stop] = np.where(learned, episode.tokens, IGNORE_INDEX)
        sampled[number, start:stop] = [chance or 0.0 for chance in episode.chances]
    rows = {"input_ids": ids[:, :-1], "labels": labels[:, 1:], "sampled": sampled[:, 1:]}
    return {key: torch.from_numpy(value) for key, value in rows.items()}


def _unpadded(rows: torch.Tensor) -> list[list[int]]:
    return [row[row != IGNORE_INDEX].tolist() for row in rows]
