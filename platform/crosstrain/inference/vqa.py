"""What a model answers to questions whose answers are known, how often it is right, and what it would guess blind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from crosstrain.data.vision.prompts import VqaDataset
from crosstrain.distributed.group import Group
from crosstrain.engine.runner import Runner
from crosstrain.inference.detokenizer import TextStream
from crosstrain.inference.generation import Sampling, Sequence, decode
from crosstrain.utils.errors import UserError
from crosstrain.utils.optional_deps import require
from crosstrain.utils.types import Sample

_LONG = 4  # words: longer answers are judged as captions too
_BLOCK = 32  # samples in a row that one rank asks about; batches do not reach beyond, whatever the number of ranks


@dataclass(frozen=True)
class Answer:
    """What was answered to a question about sample `sample` of a split. Small: ranks send it to each other."""

    sample: int
    kind: str
    question: str
    truth: str
    text: str
    blind: str  # with the images' pixels zero

    @property
    def right(self) -> bool:
        return _same(self.text, self.truth)

    @property
    def right_blind(self) -> bool:
        return _same(self.blind, self.truth)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        said = {"answer": self.text, "truth": self.truth, "right": self.right, "blind": self.blind}
        return {"sample": self.sample, "kind": self.kind, "question": self.question, **said}


def _same(a: str, b: str) -> bool:
    return a.lower().split() == b.lower().split()


def answer_questions(
    runner: Runner,
    tokenizer: Any,
    end: int,
    dataset: VqaDataset,
    max_samples: int | None,
    max_new_tokens: int,
    batch: int,
) -> tuple[list[Answer], int]:
    """Greedy answers to what a split's first samples ask, and of how many of these samples nothing can be asked.

    Collective: the ranks share the work and all get all answers, which do not depend on their number. Raises UserError
    where a question leaves no room for `max_new_tokens`.
    """
    total = len(dataset) if max_samples is None else min(max_samples, len(dataset))
    work = _Work(dataset, total, batch, runner.dp)
    batches, mine = work.batches(), list[Answer]()
    with runner.evaluating():
        while True:
            questions = next(batches, [])
            if not runner.dp.all_reduce_sum(len(questions))[0]:
                break
            # A forward may be a collective: a rank that has no question left asks nothing, as often as the others.
            prompts = [q.prompt for q in questions] or [{"input_ids": np.array([end], np.int64)}]
            said, blind = (
                _greedy(runner, tokenizer, end, prompts, max_new_tokens, text_only) for text_only in (False, True)
            )
            mine += [
                Answer(q.sample, q.kind, q.question, q.truth, *texts)
                for q, *texts in zip(questions, said, blind, strict=False)
            ]
    answers = [answer for part in runner.dp.all_gather(mine) for answer in part]
    silent = int(runner.dp.all_reduce_sum(work.silent)[0])
    return sorted(answers, key=lambda answer: answer.sample), silent  # stable: the order within a sample is kept


@dataclass(frozen=True)
class _Question:
    sample: int
    kind: str
    question: str
    truth: str
    prompt: Sample


class _Work:
    """The questions that are this rank's, in batches."""

    def __init__(self, dataset: VqaDataset, total: int, size: int, dp: Group) -> None:
        self.dataset, self.total, self.size, self.dp = dataset, total, size, dp
        self.silent = 0  # samples so far that ask nothing

    def batches(self) -> Iterator[list[_Question]]:
        for first in range(self.dp.rank * _BLOCK, self.total, self.dp.size * _BLOCK):
            block: list[_Question] = []
            for index in range(first, min(first + _BLOCK, self.total)):
                found = self.dataset.examples(index)
                self.silent += not found
                block += [_Question(index, e.kind, e.question, e.answer, e.prompt) for e in found]
            for start in range(0, len(block), self.size):
                yield block[start : start + self.size]


def _greedy(
    runner: Runner, tokenizer: Any, end: int, prompts: list[Sample], max_new_tokens: int, text_only: bool
) -> list[str]:
    """Greedy answers to prompts; with `text_only`, to those with zeros for pixels. Collective."""
    longest, limit = max(len(prompt["input_ids"]) for prompt in prompts), runner.model.max_length
    if limit is not None and longest + max_new_tokens > limit:
        raise UserError(
            f"--answers: a question has {longest} tokens and the model takes at most {limit}, so there is no room for "
            f"{max_new_tokens} more; lower --max-new-tokens"
        )
    if text_only:
        prompts = [p | {key: np.zeros_like(p[key]) for key in p if key == "pixel_values"} for p in prompts]
    sampling, ends = Sampling(max_new_tokens, temperature=0), frozenset({end})
    sequences = [Sequence(sampling, i, ends, TextStream(tokenizer, whole=True)) for i in range(len(prompts))]
    decode(runner, prompts, sequences, group=runner.dp)
    return [sequence.text.text.strip() for sequence in sequences]


def score(answers: list[Answer]) -> dict[str, dict[str, float]]:
    """By kind of question: how many, the share answered exactly right, the share that is right without images.

    Kinds whose answers are long also have BLEU-4 (Papineni et al., 2002) and CIDEr-D (Vedantam et al., 2015) by
    pycocoevalcap, the code of the COCO caption challenge; with `_blind`, without images.
    """
    kinds: dict[str, list[Answer]] = {}
    for answer in answers:
        kinds.setdefault(answer.kind, []).append(answer)
    scores = {}
    for kind, group in sorted(kinds.items()):
        scores[kind] = {
            "questions": float(len(group)),
            "right": sum(a.right for a in group) / len(group),
            "right_blind": sum(a.right_blind for a in group) / len(group),
        }
        truths = [a.truth for a in group]
        if sum(len(truth.split()) for truth in truths) / len(group) > _LONG:
            scores[kind] |= caption_scores([a.text for a in group], truths)
            blind = caption_scores([a.blind for a in group], truths)
            scores[kind] |= {f"{name}_blind": value for name, value in blind.items()}
    return scores


def caption_scores(said: list[str], truths: list[str]) -> dict[str, float]:
    """CIDEr-D and BLEU-4 of captions against one true caption each; words are what spaces separate."""
    bleu = require("pycocoevalcap.bleu.bleu", "BLEU")
    cider = require("pycocoevalcap.cider.cider", "CIDEr")
    true, made = ({i: [" ".join(text.lower().split())] for i, text in enumerate(texts)} for texts in (truths, said))
    scores = {"cider": float(cider.Cider().compute_score(true, made)[0])}
    return scores | {"bleu4": float(bleu.Bleu(4).compute_score(true, made, verbose=0)[0][3])}
